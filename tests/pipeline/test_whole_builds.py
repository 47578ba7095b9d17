"""Whole builds under the real Snakemake, one of each kind: every rule and gate, what is delivered, and what it does."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import adapters
import jsonschema
import limits
import pytest
import tiny
import torch
import yaml
from processes import succeeded
from reciter import shardmill
from serve.running import Running, running

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable
from shardmill.models.interface import DRAFT_PARTS
from shardmill.plan import load_part
from shardmill.serve.model import load_model

from .kinds import FORMS, KINDS, LABELS, SETTINGS, finished
from .project import ROOT, Project, steps_that
from .proof import faults

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
FP32 = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No receipt of a check is left to whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def the(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Project]:
    """Gives the finished build of a kind, which is made when a test first asks for it."""
    return cache(lambda name: finished(name, tmp_path_factory.mktemp(name)))


def manifest(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project.build / "model.json").read_text())
    return found


def numbers(project: Project, part: str) -> list[dict[str, Any]]:
    """Of a part's gate of parity."""
    found: list[dict[str, Any]] = json.loads((project.build / f"parity/{part}.json").read_text())["gate"]
    return found


# What holds for every kind.


@pytest.mark.parametrize("name", KINDS)
def test_the_published_schema_describes_the_manifest(the: Callable[[str], Project], name: str) -> None:
    """A runtime of another make reads it."""
    jsonschema.validate(manifest(the(name)), json.loads((ROOT / f"docs/{KINDS[name].schema}.schema.json").read_text()))


@pytest.mark.parametrize("name", KINDS)
def test_the_build_verifies(the: Callable[[str], Project], name: str) -> None:
    assert faults(the(name).build) == []


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", KINDS)
def test_the_build_is_right_on_this_machine(the: Callable[[str], Project], name: str, precision: str) -> None:
    """Every program is compared with what the build carries, also those that read lent caches, or draft."""
    done = shardmill("check", the(name).build, "--json", "--precision", precision)
    found = json.loads(done.stdout)
    states = {row["name"]: row["status"] for row in found["parts"]}
    assert done.exit_code == 0 and found["verdict"] == "right", done.stdout
    assert {*states} >= {part["name"] for part in manifest(the(name))["parts"]} and {*states.values()} == {"right"}


@pytest.mark.skipif(not is_portable(), reason="Core ML plans by itself, and nothing is predicted")
@pytest.mark.parametrize("name", KINDS)
def test_every_operation_is_predicted_to_run_on_the_neural_engine(the: Callable[[str], Project], name: str) -> None:
    found = [file for file in (the(name).build / "residency").glob("*.json") if ".receipt" not in file.name]
    counts = {file.stem: json.loads(file.read_text())["counts"] for file in found}
    assert {part for part, count in counts.items() if not count.keys() <= {"eligible", "no_device"}} == set()
    assert all(counts[part]["eligible"] > least for part, least in KINDS[name].eligible.items())


@pytest.mark.parametrize("name", KINDS)
def test_the_report_says_what_was_built(the: Callable[[str], Project], name: str) -> None:
    page = (the(name).build / "report.html").read_text()
    assert [words for words in KINDS[name].told if words not in page] == []


@pytest.mark.parametrize("name", KINDS)
def test_the_next_build_has_nothing_to_do(the: Callable[[str], Project], name: str) -> None:
    assert "0 of" in the(name).why()


# Forms of programs.


def test_functions_follow_widths_and_contexts_and_caches_are_inputs(the: Callable[[str], Project]) -> None:
    """As docs/model-json.md says."""
    content = manifest(the("forms"))
    assert content["widths"] == [1, 4]
    assert all(part["functions"] == {"1": "t1", "4": "t4"} and not part["states"] for part in content["parts"])
    layers, head = content["parts"]
    assert layers["written"] == {name: f"{name}_new" for name in ("k_0", "v_0", "k_1", "v_1")}
    assert layers["inputs"]["k_1"] == [1, 1, 64, 32] and "written" not in head
    assert (content["context"], content["contexts"], "contexts" in head) == (64, [32], False)
    shorter = layers["contexts"]["32"]
    assert shorter["functions"] == {"1": "c32_t1", "4": "c32_t4"} and shorter["inputs"]["k_1"] == [1, 1, 32, 32]
    assert shorter["inputs"].keys() == {"attn_mask", "kv_write_mask", *layers["written"]} and not shorter["states"]


def test_passes_that_no_function_takes_were_compared_too(the: Callable[[str], Project]) -> None:
    """The gate feeds every width that decoding may take: those between are filled up."""
    ways = {"T=2", "T=3", "T=4", "mixed", "rejected drafts", "context of 32", "moving between contexts"}
    assert ways <= {number["detail"] for number in numbers(the("forms"), "layers_00_02")}


def test_every_function_is_judged_at_its_width(the: Callable[[str], Project]) -> None:
    content = json.loads((the("forms").build / "residency/layers_00_02.json").read_text())
    expected = {("t1", "T=1"), ("t4", "T=4"), ("c32_t1", "T=1"), ("c32_t4", "T=4")}
    assert {(row["function"], row["shape"]) for row in content["rows"]} == expected


def test_each_function_is_a_bundle_of_its_own(the: Callable[[str], Project]) -> None:
    """With the weights of all of them on the disk once; model.json says where they lie."""
    build = the("forms").build
    layers = manifest(the("forms"))["parts"][0]["program"]
    assert layers["bundles"] == {name: f"{layers['path']}/{name}.mlmodelc" for name in ("c32_t1", "c32_t4", "t1", "t4")}
    folder = build / layers["path"]
    assert {path.name for path in folder.glob("*.mlmodelc")} == {Path(path).name for path in layers["bundles"].values()}
    weights = [*folder.glob("*/weights/weight.bin"), *build.glob("packages/layers*/**/weight.bin")]
    assert (len(weights), len({path.stat().st_ino for path in weights})) == (5, 1)


# Experts that the host routes to.


def test_groups_follow_their_layers_part_and_divide_its_experts(the: Callable[[str], Project]) -> None:
    content = manifest(the("experts"))
    assert [part["kind"] for part in content["parts"]] == ["layers", "experts", "experts", "head"]
    groups = content["parts"][1:3]
    assert [(part["start"], part["end"]) for part in groups] == [(0, 6), (6, 12)]
    assert all(part["inputs"]["weights"] == [1, 6, "T", 1] and not part["states"] for part in groups)


# A program for labels.

SHARES = limits.logprobs(limits.model(tiny.LAYERS, tiny.FFN), 2, tiny.VOCAB)
TEXTS = ["def decode(self, s", "    if not isinstance(", 'raise JSONDecodeError("Expecting value']


@FP32
def test_a_part_for_labels_goes_through_every_gate_and_into_every_file(the: Callable[[str], Project]) -> None:
    project = the("labels")
    content, found = manifest(project), {row["name"]: row for row in numbers(project, "labels")}
    *_, part = content["parts"]
    tokenizer = read_tokenizer(project.build / "source/tokenizer.json")
    assert part["kind"] == "labels" and part["inputs"].keys() == {"hidden"}
    assert part["tokens"] == [tokenizer.encode(label).ids[0] for label in LABELS]
    assert "labels" in content["uses"] and "labels" in content["packages"]
    assert found["program_error"]["value"] > 0 and found["psnr"]["passed"]
    limits.agrees("the labels' part", found["program_error"]["value"], limits.sums("fp32", tiny.HIDDEN, limits.HEAD))
    assert json.loads((project.build / "residency/labels.json").read_text())["part"] == "labels"
    for name in ("provenance.json", "test-results.jsonl"):
        assert "compiled/labels.mlmodelc" in (project.build / name).read_text()
    for command in (("verify",), ("warm",), ("device", "kit", "--output", project.folder / "kit.zip")):
        result = shardmill(command[0], *command[1:2], project.build, *command[2:])
        assert result.exit_code == 0, result.output


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def served(request: pytest.FixtureRequest, the: Callable[[str], Project]) -> Iterator[tuple[str, Running]]:
    with running(load_model(the("labels").build, None, request.param)) as server:
        yield request.param, server


def decided(server: Running, **body: Any) -> list[dict[str, float]]:
    """The probabilities of the labels after each text."""
    status, answer = server.post({"model": "tiny", "input": TEXTS, "labels": LABELS, **body}, "/v1/decide")
    assert status == 200, answer
    assert all(("logprob" in one) == body.get("logprobs", True) for row in answer["data"] for one in row["labels"])
    return [{one["label"]: one["probability"] for one in row["labels"]} for row in answer["data"]]


def transformers_shares(build: Path) -> list[list[float]]:
    """transformers' softmax over the labels' logits after each text, with the weights that the packages hold."""
    model, held = tiny.transformers_model(build / "source"), dict[str, list[torch.Tensor]]()
    for name in ("layers_00_02", "head_0", "head_1"):
        stored = PackageWeights(build / f"packages/{name}.mlpackage", load_part(build / f"parts/{name}.json"))
        for tensor in stored.part.tensors:
            held.setdefault(tensor.source.tensor, []).append(stored.block(tensor))
    for name, weight in model.named_parameters():
        if name in held:
            blocks = held[name] if name.startswith("lm_head") else held[name][:1]  # both slices hold the norm
            weight.data.copy_(torch.cat(blocks).reshape(weight.shape))
    tokenizer = read_tokenizer(build / "source/tokenizer.json")
    tokens = [tokenizer.encode(label).ids[0] for label in LABELS]
    with torch.no_grad():
        rows = [model(torch.tensor([tokenizer.encode(text).ids])).logits[0, -1, tokens].double() for text in TEXTS]
    return [row.softmax(0).tolist() for row in rows]


@FP32
def test_the_server_decides_alike_by_either_head(the: Callable[[str], Project], served: tuple[str, Running]) -> None:
    """To fp64's rounding where the engine rounds all shapes of a product alike, and as transformers does in fp32."""
    precision, server = served
    few, whole = decided(server, logprobs=False), decided(server)
    for one, other in zip(few, whole, strict=True):
        limit = limits.sums("fp64", len(LABELS)) if precision == "fp16" else SHARES
        limits.numbers_agree("shares by either head", one, other, limit, size=1)
    if precision == "fp32":
        for found, expected in zip(few, transformers_shares(the("labels").build), strict=True):
            limits.numbers_agree("shares", [found[label] for label in LABELS], expected, SHARES, size=1)
    others = decided(server, labels=[*LABELS, " is"], logprobs=False)
    assert [row[" is"] > 0 for row in others] == [True] * len(TEXTS)


# Adapters as inputs.

PROMPT = "def loads(s, *, cls=None"


@FP32
def test_the_gate_computes_with_an_adapter_that_the_manifest_describes(the: Callable[[str], Project]) -> None:
    content = manifest(the("adapters"))
    layers, head = content["parts"]
    assert content["adapters"] == 8
    assert "adapters" in content["uses"] and "adapters" not in head
    assert layers["inputs"]["adapter_attn"] == [1, 2, 32, tiny.HIDDEN]
    assert layers["adapters"]["adapter_ffn"] == [0, 1]
    rows = numbers(the("adapters"), "layers_00_02")
    found = {number["detail"]: number["value"] for number in rows if number["name"] == "adapter_error"}
    assert {"T=1", "T=2", "context of 32"} <= found.keys() and min(found.values()) > 0
    limits.agrees("a part with an adapter", max(found.values()), limits.model(2, tiny.FFN))


@FP32
def test_a_build_with_an_adapter_still_verifies_and_answers(the: Callable[[str], Project], tmp_path: Path) -> None:
    build = tmp_path / "tiny"
    shutil.copytree(the("adapters").build, build, symlinks=True)
    lora = adapters.write_lora(build / "source", tmp_path / "lora", 3, 0.25)
    assert shardmill("adapter", "add", build, lora, "--name", "told").exit_code == 0
    verified = shardmill("verify", build)
    assert verified.exit_code == 0, verified.output
    file = build / "adapters/told/adapter.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "not the bytes that adapters/told/adapter.json names" in shardmill("verify", build).output
    file.write_bytes(whole)
    given = ("generate", build, "--prompt", PROMPT, "--max-new-tokens", 8, "--json")
    bare, adapted = (json.loads(shardmill(*given, *more).stdout)["tokens"] for more in ((), ("--adapter", "told")))
    assert bare != adapted
    for command in ("inspect", "lint"):
        result = shardmill(command, next(build.glob("packages/layers_*.mlpackage")))
        assert result.exit_code == 0, result.output
    warmed = shardmill("warm", build)
    assert warmed.exit_code == 0, warmed.output


# Encoders. What follows the programs of those that embed and rank is in test_encoder_manifests.py.

OPTIONAL = {"silu", "uses", "requires", "causal", "dense", "prompts", "default_prompt", "template", "instruction"}
OPTIONAL |= {"width"}


def test_every_bucket_has_the_same_weight_file(the: Callable[[str], Project]) -> None:
    """Of packages and compiled bundles alike there is a single one on the disk."""
    found = sorted(the("encoder").build.rglob("weight.bin"))
    assert len(found) == 4 and all(file.samefile(found[0]) for file in found)


def test_the_published_schema_names_every_key_of_an_encoder(the: Callable[[str], Project]) -> None:
    schema = json.loads((ROOT / "docs/encoder.schema.json").read_text())
    assert schema["properties"].keys() == {*schema["required"], *OPTIONAL} == manifest(the("encoder")).keys() | OPTIONAL


def test_the_report_of_an_encoder_has_nothing_of_what_only_decoders_have(the: Callable[[str], Project]) -> None:
    page = (the("encoder").build / "report.html").read_text()
    speed = json.loads((the("encoder").build / "benchmark/speed.json").read_text())
    assert f"{speed['sentences']['per_second']:.1f} sentences a second" in page
    shown = page.partition('id="provenance"')[0]  # which has the config, with every default
    assert [word for word in ("speculation", "drafter", "key/value", "rejected") if word in shown] == []


# Trained drafters.

DRAFTERS = ("eagle3", "assistant", "mtp")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_manifest_names_the_drafter(the: Callable[[str], Project], name: str) -> None:
    build, content = the(name).build, manifest(the(name))
    assert [part["name"] for part in content["parts"] if part.get("drafter")] == [*DRAFT_PARTS]
    assert {"drafts_agreement", "drafts_agreement_fp16"} <= {row["name"] for row in numbers(the(name), "stack")}
    assert "drafter" in content["uses"] and content["drafter"]["kind"] == name
    assert set(DRAFT_PARTS) < content["packages"].keys()
    materials = (build / "provenance.json").read_text()
    assert ("source/drafter/model.safetensors" in materials) == (name != "mtp")
    speed = json.loads((build / "benchmark/speed.json").read_text())
    assert {row["drafter"] for row in speed["sweep"]} == {"ngram", name}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_is_the_same_with_the_drafter(the: Callable[[str], Project], name: str) -> None:
    given = ("generate", the(name).build, "--prompt", tiny.sample_text()[:60], "--max-new-tokens", 24, "--json")
    plain, drafted = (
        json.loads(shardmill(*given, "--drafter", drafter, "--policy", "always").stdout) for drafter in ("none", name)
    )
    assert plain["tokens"] == drafted["tokens"] and sum(drafted["drafted"]) > 30


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_kit_holds_the_drafters_programs(the: Callable[[str], Project], name: str, tmp_path: Path) -> None:
    packed = shardmill("device", "kit", the(name).build, "--output", tmp_path / "kit.zip")
    assert packed.exit_code == 0, packed.output
    held = zipfile.ZipFile(tmp_path / "kit.zip").namelist()
    assert all(any(part in path for path in held) for part in DRAFT_PARTS)


# The last test of a build, since it changes it.


def test_bundles_of_all_functions_convert_nothing_again(the: Callable[[str], Project]) -> None:
    """The packages are the same; what is loaded of them is made and judged anew."""
    project = the("forms")
    settings = {**SETTINGS, "program": {**FORMS, "bundles": "one"}}
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    done = project.run("build/tiny/compiled/layers_00_02.receipt.json", verbose=True)
    succeeded(done)
    worked = [line for line in done.stdout.splitlines() if ": worked" in line]
    assert len(worked) == 1 and worked[0].startswith("shardmill compile tiny layers_00_02"), done.stdout
    assert [path.name for path in (project.build / "compiled/layers_00_02.mlmodelc").glob("*.mil")] == ["model.mil"]


def test_text_alone_has_the_same_packages(the: Callable[[str], Project]) -> None:
    """Without its images the build converts nothing again: the decoder's programs are what they were."""
    project, parts = the("images"), ("layers_00_04", "head_0")
    packages = [project.build / f"packages/{part}.mlpackage" for part in parts]
    before = [{file: file.read_bytes() for file in package.rglob("*") if file.is_file()} for package in packages]
    settings = {key: value for key, value in KINDS["images"].settings.items() if key != "images"}
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    done = project.run(*(f"build/tiny/packages/{part}.receipt.json" for part in parts), verbose=True)
    succeeded(done)
    assert steps_that("worked", done.stdout) == {"split"} and "convert" in steps_that("unchanged", done.stdout)
    assert before == [{file: file.read_bytes() for file in files} for files in before]
