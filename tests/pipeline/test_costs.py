"""What `shardmill plan` says that a build takes, against what Snakemake plans, the files' sizes and this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import yaml
from models import tiny_encoders
from reciter import shardmill
from safetensors.torch import save_file

from shardmill import config
from shardmill.config import Config
from shardmill.pipeline import costs, resources, times
from shardmill.pipeline.costs import Costs, lines
from shardmill.pipeline.planned import planning
from shardmill.pipeline.preview import preview

ROOT = Path(__file__).parents[2]
CONTENT: dict[str, Any] = {
    **{"model": "tiny", "source": {"path": "checkpoint"}, "context": 64},
    "parity": {"text": "text.txt", "positions": 16, "perplexity_positions": 48},
    "benchmark": {"text": "text.txt", "prompt_tokens": [8], "tasks": [], "new_tokens": 8, "repetitions": 1},
}
LARGE = 100_000_000_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a checkpoint of four layers, on a machine that has room for it."""
    tiny.write_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "text.txt").write_text(tiny.sample_text(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resources, "memory_bytes", lambda: LARGE)
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=LARGE))
    monkeypatch.setattr(times, "busy", lambda: 0.0)
    return tmp_path


def of(**changes: Any) -> Costs:
    found = preview(config.parse(CONTENT | changes)).costs
    assert found is not None
    return found


@pytest.mark.thorough(but=["{}"])
@pytest.mark.parametrize(
    "changes", [{}, {"topology": [[0, 1], [1, 4]], "head": {"slices": 2}}, {"benchmark": False}], ids=str
)
def test_memory_is_that_of_the_job_for_which_snakemake_plans_most(folder: Path, changes: dict[str, Any]) -> None:
    """Both take it from one table; here they agree on the jobs, too."""
    (folder / "tiny.json").write_text(json.dumps(CONTENT | changes))
    workflow = planning(folder / "tiny.json")
    declared = {}
    for job in workflow.dag.jobs:
        if "model" in job.wildcards_dict:
            declared[f"{job.rule.name} {job.wildcards_dict.get('part', '')}".strip()] = job.resources["mem_mb"]
    found = of(**changes)
    assert found.memory == max(declared.values()) == declared[found.largest]


def test_what_a_run_refuses_the_plan_refuses_in_the_same_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is shown before."""
    monkeypatch.setattr(resources, "memory_bytes", lambda: 500_000_000)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONTENT))
    found = of()
    assert (found.allowed, found.memory > 450) == (450, True)
    said = shardmill("plan", "tiny.yaml")
    line = (
        f"{found.largest}: needs {found.memory} MB of memory and this build may use 450; allow more with "
        f"--resources mem_mb={found.memory}"
    )
    assert (said.exit_code, said.stderr) == (1, f"shardmill: {line}\n")
    assert f"memory: {found.memory / 1000:.1f} GB for {found.largest}, " in said.stdout
    assert str(resources.TooLarge(found.largest, found.memory, 450)) == line


@pytest.mark.parametrize(("free", "short"), [(2_000_000, True), (LARGE, False)])
def test_too_little_disk_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, short: bool) -> None:
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONTENT))
    said = shardmill("plan", "tiny.yaml")
    assert said.exit_code == 0
    line = f"warning: the build takes {costs.size(of().build)} of disk, and 2.0 MB are free for build; free some "
    assert (line in said.stdout) == short


def test_the_reference_is_as_large_as_its_tensors(folder: Path) -> None:
    """Hidden states around each layer at the first positions, and logits at all of them."""
    import torch

    from shardmill.pipeline.resolve import described_to_fit

    asked = config.parse(CONTENT)
    a = described_to_fit(asked)[1].architecture
    tensors = {"hidden": torch.zeros(a.layers + 1, 16, a.graph.hidden), "logits": torch.zeros(48, a.vocab)}
    save_file(tensors, folder / "states.safetensors")
    assert (folder / "states.safetensors").stat().st_size == pytest.approx(costs._reference(asked, a), abs=400)


def test_what_is_larger_takes_more(folder: Path) -> None:
    """Each by what it adds: positions to the reference, fp16 to weights, functions to the programs' texts."""
    plain = of()
    more = of(parity=CONTENT["parity"] | {"perplexity_positions": 64})
    vocab = json.loads((folder / "checkpoint/config.json").read_text())["vocab_size"]
    assert more.build - plain.build == 2 * 4 * 16 * vocab
    wide = of(convert={"precision": "fp16"})
    weights = [preview(config.parse(CONTENT | c)).weight_bytes for c in ({"convert": {"precision": "fp16"}}, {})]
    assert wide.build - plain.build == weights[0] - weights[1] > 0
    fixed = of(program={"shapes": "fixed"}, tokens={"max": 4, "verify": 2})
    assert fixed.build - plain.build == pytest.approx(2 * 4 * costs.LAYER, rel=0.05)


def test_an_encoder_s_weights_are_stored_once(folder: Path) -> None:
    """However many buckets; each adds its rows of the reference, which is stored twice, and its texts."""
    tiny_encoders.write_tiny("bert", folder / "encoder")
    content = {"model": "e", "source": {"path": "encoder"}, "parity": CONTENT["parity"], "benchmark": False}
    one, two = (preview(config.parse({**content, "buckets": b})) for b in ([16], [16, 64]))
    assert one.costs and two.costs and two.weight_bytes == 2 * one.weight_bytes
    settings = json.loads((folder / "encoder/config.json").read_text())
    texts = settings["num_hidden_layers"] * costs.LAYER + costs.PROGRAM
    rows = 4 * settings["hidden_size"]
    more = two.costs.build - one.costs.build - texts
    assert more == 2 * rows * (2 * 48 - 16)


def test_a_checkpoint_in_a_folder_is_linked_and_nothing_comes(folder: Path) -> None:
    found = of()
    held = {path.name: path.stat().st_size for path in (folder / "checkpoint").iterdir()}
    assert (found.checkpoint, found.download, found.cache) == (sum(held.values()), 0, "")
    shown = [*lines(found)]
    assert shown[0].endswith(f"; the checkpoint, {costs.size(found.checkpoint)}, is linked")
    assert not any(line.startswith("download") for line in shown)


def test_each_step_has_its_time_and_the_whole_one_with_four_cores(folder: Path) -> None:
    found = of()
    assert {"parity", "benchmark", "convert"} <= {*found.stages} and "witness" not in found.stages
    assert found.seconds is not None and 0 < found.seconds < sum(filter(None, found.stages.values()))
    assert "benchmark" not in of(benchmark=False).stages
    shown = "\n".join(lines(found))
    assert "with --cores 4, by a factor of 2 more or less" in shown and "busy" not in shown
    busy = "\n".join(lines(replace(found, others=7.0)))
    assert "(busy: 7 processes on " in busy


def test_on_core_ml_time_is_not_known_before_a_first_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = times.Times(times.REFERENCE, {}, clock=True, file=folder / "speed.json")
    monkeypatch.setattr(times, "times", lambda: known)
    found = of()
    assert (found.seconds, found.stages["parity"], found.stages["convert"] is None) == (None, None, False)
    assert "time: not known before a first build has loaded programs on this Mac" in "\n".join(lines(found))


def test_what_can_t_be_built_costs_nothing(folder: Path) -> None:
    (folder / "text.txt").write_text("")
    assert preview(config.parse(CONTENT)).costs is None


def test_every_step_of_a_build_is_counted(folder: Path) -> None:
    """Also those that only some configs have."""
    asked: Config = config.parse(CONTENT)
    names = {step.name for step in costs.steps(asked)}
    assert names >= {*times.COSTS, "benchmark"} and "search" not in names
