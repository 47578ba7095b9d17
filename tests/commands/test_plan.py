"""`shardmill plan` on a command line: a table for people, JSON for programs, and an exit code for both."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import towers
import yaml
from typer.testing import CliRunner

from shardmill import cli
from shardmill.commands import pipeline
from shardmill.errors import ConfigError
from shardmill.models.interface import DRAFT_PARTS
from shardmill.pipeline import snakefile

ROOT = Path(__file__).parents[2]
KEYS = {
    "model", "source", "model_type", "context", "tokens_max", "verify", "shapes", "widths", "weights", "topology",
    "head_slices", "weight_file_limit", "programs", "table_bytes", "rows_bytes", "row_bytes", "weight_bytes",
    "state_bytes", "bytes_per_token", "tensors", "refused", "buckets", "images", "audio", "task", "bits_per_weight",
    "bytes_by_form",
    "expert_groups", "passes", "lengths", "reshape_frequency", "windows", "adapters", "long_factors",
    "adapter_bytes", "adapter_operations", "adapter_verdict", "systems", "warnings",
    "costs",
}  # fmt: skip
PROGRAM_KEYS = {
    "name",
    "kind",
    "start",
    "end",
    "layers",
    "weight_bytes",
    "state_bytes",
    "lent_bytes",
    "runs_on",
    "matrices",
    "parameters",
}


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_demo_is_shown_as_json() -> None:
    """Scripts read these keys: one that goes or changes its name breaks them."""
    said = CliRunner().invoke(cli.app, ["plan", "configs/demo.yaml", "--json"])
    assert said.exit_code == 0
    found = json.loads(said.stdout)
    assert set(found) == KEYS
    assert all(set(program) == PROGRAM_KEYS for program in found["programs"])
    assert found["topology"] == [[0, 20], [20, 24], [24, 30], [30, 32]]
    assert found["programs"][0]["weight_bytes"] == 2021184
    assert found["programs"][0]["matrices"]["layers.0.mlp.down_proj.weight"] == "int8"
    assert 8 < found["bits_per_weight"] < 9


def test_the_demo_is_shown_as_a_table() -> None:
    said = CliRunner().invoke(cli.app, ["plan", "configs/demo.yaml"])
    assert said.exit_code == 0
    assert "topology: [[0, 20], [20, 24], [24, 30], [30, 32]]\nhead.slices: 4\n" in said.stdout
    assert "8 dispatches" in said.stdout and "loaded with reshapeFrequency infrequent" in said.stdout
    assert len([line for line in said.stdout.splitlines() if line.startswith(("  layers_", "  head_"))]) == 8


def test_files_are_found_beside_the_workflow_as_in_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli.app, ["plan", str(ROOT / "configs/demo.yaml")])
    assert said.exit_code == 0, said.output


def test_what_a_search_leaves_is_at_most_what_is_planned(tmp_path: Path) -> None:
    """Its forms are known once it has searched."""
    file, convert = tmp_path / "a.yaml", {"precision": "search", "calibration": {"text": "resources/demo/config.json"}}
    content = {"model": "m", "source": {"path": "resources/demo"}, "context": 128}
    file.write_text(yaml.safe_dump(content | {"convert": convert | {"budget": {"perplexity": 1.03}}}))
    said = CliRunner().invoke(cli.app, ["plan", str(file)])
    assert said.exit_code == 0
    assert "weights: at most 8." in said.stdout and "a pass of one token reads at most " in said.stdout


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_what_can_t_be_built_ends_with_a_line_and_an_exit_code(tmp_path: Path, more: list[str]) -> None:
    """After the plan as it stands, so that a person sees which part it is."""
    file = tmp_path / "a.yaml"
    source = {"path": "resources/phi-4-mini"}
    file.write_text(yaml.safe_dump({"model": "m", "source": source, "context": 2048, "topology": [[0, 32]]}))
    said = CliRunner().invoke(cli.app, ["plan", str(file), *more])
    assert said.exit_code == 1
    assert said.stderr.startswith(f"shardmill: {file}: topology: layers_00_32 holds 3223408704 bytes of weights")
    assert "[[0, 8], [8, 16], [16, 24], [24, 32]] fits" in said.stderr
    assert said.stderr.count("\n") == 1
    assert "layers_00_32" in said.stdout


def test_each_part_says_on_which_systems_it_is_expected_on_the_neural_engine(tmp_path: Path) -> None:
    """In a column, and in a line for those that some systems give to the CPU; a named system refuses them."""
    file = tmp_path / "a.yaml"
    content = {"model": "m", "source": {"path": "resources/phi-4-mini"}, "context": 2048}
    content |= {"topology": [[0, 20], [20, 32]], "head": {"slices": 1}}
    file.write_text(yaml.safe_dump(content))
    said = CliRunner().invoke(cli.app, ["plan", str(file)], env={"COLUMNS": "160"}).stdout
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith(("  layers_", "  head_"))}
    assert rows["layers_00_20"].rstrip().endswith("macOS 15 to 26 and iOS 26")
    assert rows["layers_20_32"].rstrip().endswith("macOS 15 to 26 and iOS 26")
    assert rows["head_0"].rstrip().endswith("all")
    assert "systems: macOS 15 to 27 and iOS 18 to 27\n" in said
    assert "\nwarning: layers_00_20, layers_20_32: expected on the CPU on macOS 27, iOS 18 and iOS 27, " in said
    file.write_text(yaml.safe_dump(content | {"program": {"runs_on": ["macOS 15", "macOS 26"]}}))
    said = CliRunner().invoke(cli.app, ["plan", str(file)], env={"COLUMNS": "160"}).stdout
    assert "systems: macOS 15 to 26\n" in said and "warning" not in said
    file.write_text(yaml.safe_dump(content | {"program": {"runs_on": ["iOS 27", "iOS 27"]}}))
    refused = CliRunner().invoke(cli.app, ["plan", str(file)])
    assert refused.exit_code == 1 and "the limit is 1073741824 (rule W2); [[0, 8], [8, 16]," in refused.stderr


def test_an_error_before_there_is_a_plan_names_the_config(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    source = {"path": "resources/phi-4-mini"}
    file.write_text(yaml.safe_dump({"model": "m", "source": source, "context": 2048, "topology": [[0, 31]]}))
    said = CliRunner().invoke(cli.app, ["plan", str(file), "--json"])
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr == f"shardmill: {file}: topology: ends at layer 31, the model has 32\n"


def test_what_a_token_takes_in_each_context_is_a_table_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    content = {"model": "m", "source": {"path": "resources/demo"}, "context": 1024}
    file.write_text(yaml.safe_dump(content | {"program": {"shapes": "fixed", "contexts": [128, 512]}}))
    said = CliRunner().invoke(cli.app, ["plan", str(file)])
    assert said.exit_code == 0
    shown = said.stdout.partition("tensors: ")[0].splitlines()
    rows = [line.split() for line in shown[-4:-1]]  # above an empty line
    assert [row[0] for row in rows] == ["128", "512", "1024"]
    found = json.loads(CliRunner().invoke(cli.app, ["plan", str(file), "--json"]).stdout)
    assert [one["slots"] for one in found["lengths"]] == [128, 512, 1024]
    assert (found["lengths"][2]["kept"], found["lengths"][2]["bytes"]) == (
        found["state_bytes"],
        found["bytes_per_token"],
    )
    assert found["lengths"][0]["kept"] * 8 == found["state_bytes"]


@pytest.mark.parametrize("more", [0, 1])
def test_a_context_over_longrope_s_original_length_is_said_to_change_short_texts(more: int, tmp_path: Path) -> None:
    original = json.loads((ROOT / "resources/demo/config.json").read_text())["original_max_position_embeddings"]
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "source": {"path": "resources/demo"}, "context": original + more}))
    said = CliRunner().invoke(cli.app, ["plan", str(file)])
    assert said.exit_code == 0, said.output
    line = f"context {original + more}: over the original length: LongRoPE's long factors for short texts too\n"
    assert (line in said.stdout) == bool(more) == ("LongRoPE" in said.stdout)


@pytest.mark.parametrize(("bucket", "windows"), [(512, "approximate"), (2080, "approximate"), (4096, "exact")])
def test_an_encoder_says_how_it_reads_longer_texts(bucket: int, windows: str, tmp_path: Path) -> None:
    """Its tokens depend on 1,024 others on either side, which windows of 2,080 tokens hold at too high a price."""
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "source": {"path": "resources/privacy-filter"}, "buckets": [bucket]}))
    said = CliRunner().invoke(cli.app, ["plan", str(file)])
    assert f"\na longer text: {windows} windows of {bucket} tokens\n" in said.stdout
    assert json.loads(CliRunner().invoke(cli.app, ["plan", str(file), "--json"]).stdout)["windows"] == windows


@pytest.mark.parametrize(
    ("kind", "lent", "said"),
    [
        ("fuse", 0, "a dispatch after each pass, and 2 for each token, which read 60 B"),
        ("mtp", 0, "3 dispatches for each token, which read 63 B"),
        ("join", 5, "3 dispatches for each token, which read 68 B, the model's caches included"),
    ],
)
def test_a_draft_costs_what_is_run_for_each_of_its_tokens(kind: str, lent: int, said: str) -> None:
    """An EAGLE-3 head fuses what the model has computed, and so once after each pass."""
    sizes = {kind: (3, 0), "layers": (10, lent), "head": (50, 0)}
    programs = [
        SimpleNamespace(name=name, kind=each, weight_bytes=size, state_bytes=0, lent_bytes=read)
        for name, (each, (size, read)) in zip(DRAFT_PARTS, sizes.items(), strict=True)
    ]
    found: Any = SimpleNamespace(programs=programs)
    assert pipeline.draft_costs(found) == f"\na draft: {said}"


REFUSED: dict[str, dict[str, Any]] = {
    "a text that is not there": {"parity": {"text": "nope.txt"}},
    "no text to calibrate by": {"convert": {"calibration": {"text": "nope.txt"}}},
    "a text that judges itself": {"convert": {"calibration": {"text": "resources/text/code.txt"}}},
    "prompts that are not there": {"benchmark": {"tasks": ["nothing"]}},
    "labels that are no tokens": {"program": {"shapes": "fixed", "labels": ["two words of it", "b"]}},
    "layers that the model lacks": {"topology": [[0, 2]]},
    "slices that do not divide": {"head": {"slices": 7}},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_snakemake_refuses_the_plan_refuses_in_the_same_words(case: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    content = {"model": "m", "source": {"path": "resources/demo"}, "context": 128} | REFUSED[case]
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as refused:
        snakefile.resolved(content, str(file))
    said = CliRunner().invoke(cli.app, ["plan", str(file)])
    assert (said.exit_code, said.stderr) == (1, f"shardmill: {refused.value}\n")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("qwen3_5", "images: 8 in a request, each made smaller to at most 4096 pixels, 16 tokens\n"),
        (
            "smolvlm",
            "images: 8 in a request, each seen in views of at most 2304 pixels, 9 tokens; 5 at most, so 45 tokens\n",
        ),
        (
            "lfm2_vl",
            "images: 8 in a request, each seen in views of at most 4096 pixels, 16 tokens; 5 at most, so 80 tokens\n",
        ),
    ],
)
def test_what_images_take_is_said(kind: str, said: str, tmp_path: Path) -> None:
    """And without the settings of the checkpoint's image processor that the build is refused."""
    settings = {"model": "tiny", "source": {"path": str(towers.write_pictured(tmp_path / "checkpoint", kind))}}
    settings |= {"context": 64, "images": {"patches": towers.BUCKETS[kind]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    shown = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "config.yaml")])
    assert shown.exit_code == 0 and said in shown.stdout
    (tmp_path / "checkpoint/preprocessor_config.json").unlink()
    shown = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "config.yaml")])
    assert shown.exit_code == 1 and "has neither preprocessor_config.json nor processor_config.json" in shown.output
