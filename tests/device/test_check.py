"""Whether a build is right on a machine: sound ones are, and each fault is found by the numbers and named in a line."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import assistants
import checked
import encoders
import jsonschema
import mtp_layers
import numpy as np
import pytest
import routed
import tiny
from models import tiny_encoders, tiny_families
from portable_coreml.run import fuse, lowered, plan, signature
from safetensors.numpy import load_file, save_file

from shardmill.checkpoint.hashing import hash_file, tree_hashes
from shardmill.commands.check import check_digests
from shardmill.device import check
from shardmill.device.kit import write_kit
from shardmill.files import write_json
from shardmill.gates import expected
from shardmill.machine import is_portable
from shardmill.models.interface import DRAFT_PARTS
from shardmill.runtime.encoder import load_encoder
from shardmill.runtime.engine import Engine, load
from shardmill.runtime.expected import read_expected
from shardmill.runtime.manifest import entries

from .measuring import PORTABLE, environment, lines, result, unpacked

pytestmark = pytest.mark.skipif(not is_portable(), reason="spoils programs of the portable engine")
ROOT = Path(__file__).parents[2]
LAYERS, NEXT, LAST = "layers_00_02", "layers_02_03", "layers_03_04"


@pytest.fixture
def build(checkable: Path, tmp_path: Path) -> Path:
    """A copy of a sound build, which a test may spoil."""
    return Path(shutil.copytree(checkable, tmp_path / "tiny"))


def manifest(build: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((build / "model.json").read_text())
    return found


def found_by(build: Path, precision: str, spoil: Callable[[Engine], None] = lambda engine: None) -> list[check.Checked]:
    """What a check says of a build on an engine that was spoilt after its load."""
    engine: Any = load(build, precision)
    spoil(engine)
    return [*check.check_parts(build, manifest(build), engine, precision)]


def wrong(found: list[check.Checked]) -> list[str]:
    return [one.name for one in found if one.status == check.WRONG]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_sound_build_is_right(checkable: Path, precision: str) -> None:
    found = found_by(checkable, precision)
    assert {one.status for one in found} == {check.RIGHT}
    assert [one.name for one in found] == [LAYERS, NEXT, LAST, "head_0", "head_1", check.ANSWER]
    assert all(0 < error < one.limit / 4 for one in found for error in one.errors.values() if one.limit)
    assert {way for one in found for way in one.errors} == {"T=1", "T=4", "the last slots"}
    assert check.told(checkable, found).startswith(
        f"{checkable}: right on this machine: 5 programs, first answer: its 8 tokens"
    )


@pytest.mark.parametrize(
    ("said", "status"),
    [("", check.RIGHT), ("near tie: token 2 is 1, not 8", check.RIGHT), ("token 2 is 1, not 8", check.WRONG)],
)
def test_a_near_tie_of_the_first_answer_is_no_fault(
    said: str, status: str, checkable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine may decide it otherwise; any other token is wrong."""
    monkeypatch.setattr(Engine, "first_answer", lambda self: said)
    *parts, answer = found_by(checkable, "fp32")
    assert answer.name == check.ANSWER and answer.status == status and (said or "its 8 tokens") in answer.said
    assert check.verdict([*parts, answer]) == status


def test_results_that_were_thinned_out_are_compared(
    built: tiny.Build, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only every n-th channel of hidden states lies in the file, which must not be too large."""
    monkeypatch.setattr(expected, "MOST_BYTES", 17_500)
    checked.record(built, build)
    assert (build / checked.FILE).stat().st_size < 20_000 and read_expected(build / checked.FILE).parts[LAST].every == 4
    assert {one.status for one in found_by(checked.named(build), "fp32")} == {check.RIGHT}
    assert wrong(found_by(build, "fp32", spoilt(LAST, outputs=channels_moved)))[0] == LAST


@dataclass
class Spoilt:
    """A model whose inputs, state or results are not what they should be."""

    model: Any
    inputs: Callable[[dict[str, Any]], dict[str, Any]] = dict
    state: Callable[[Any], None] = lambda state: None
    outputs: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def make_state(self) -> Any:
        return self.model.make_state()

    def predict(self, data: Mapping[str, Any], state: Any = None) -> dict[str, Any]:
        found = self.outputs(self.model.predict(self.inputs(dict(data)), state=state))
        self.state(state)
        return found


def program(engine: Engine, name: str) -> Any:
    return next(one for one in engine.programs if one.name == name)


def spoilt(name: str, **how: Any) -> Callable[[Engine], None]:
    """Return what spoils a part's program."""

    def spoil(engine: Engine) -> None:
        one = program(engine, name)
        one.models = {function: Spoilt(model, **how) for function, model in one.models.items()}

    return spoil


def swapped(engine: Engine) -> None:
    """The engine calls the function of another program, which takes the same inputs."""
    first, second = (program(engine, name) for name in ("head_0", "head_1"))
    first.models, second.models = second.models, first.models


def moved(state: Any) -> None:
    """What a pass has written lies a slot further."""
    for name in ("k_2", "v_2"):
        state.write_state(name, np.roll(state.read_state(name), 1, axis=2))


def wide(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Change the results of passes of several tokens."""
    return lambda given: {name: change(np.array(a)) if a.shape[2] > 1 else a for name, a in given.items()}


def one_further(name: str, axis: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, name: np.roll(given[name], 1, axis)}


def channels_moved(given: dict[str, Any]) -> dict[str, Any]:
    return {name: np.roll(array, 1, 1) for name, array in given.items()}


def not_a_number(given: dict[str, Any]) -> dict[str, Any]:
    return {name: np.full_like(array, np.nan) for name, array in given.items()}


FAULTS: dict[str, tuple[Callable[[Engine], None], list[str]]] = {
    "another program's function": (swapped, ["head_0", "head_1", check.ANSWER]),
    "a row in another's place": (spoilt(NEXT, outputs=wide(lambda a: np.roll(a, 1, 2))), [NEXT, check.ANSWER]),
    "channels in each other's places": (spoilt(LAST, outputs=channels_moved), [LAST, check.ANSWER]),
    "a state shifted by a slot": (spoilt(NEXT, state=moved), [NEXT, check.ANSWER]),
    "a mask off by one slot": (spoilt(NEXT, inputs=one_further("attn_mask", 3)), [NEXT, check.ANSWER]),
    "tokens written one slot further": (spoilt(NEXT, inputs=one_further("kv_write_mask", 2)), [NEXT, check.ANSWER]),
    "positions one further for keys": (spoilt(LAYERS, inputs=one_further("rope_sin", 0)), [LAYERS, check.ANSWER]),
    "no numbers": (spoilt("head_1", outputs=not_a_number), ["head_1", check.ANSWER]),
}  # fmt: skip


@pytest.mark.thorough(
    but=[
        "another program's function-fp32",
        "a row in another's place-fp32",
        "channels in each other's places-fp32",
        "a state shifted by a slot-fp32",
        "a mask off by one slot-fp32",
        "tokens written one slot further-fp32",
        "positions one further for keys-fp32",
        "no numbers-fp32",
    ]
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_engine_is_named_with_its_part(checkable: Path, fault: str, precision: str) -> None:
    spoil, named = FAULTS[fault]
    found = found_by(checkable, precision, spoil)
    assert set(wrong(found)) <= set(named) and wrong(found)[0] == named[0]
    said = check.told(checkable, found)
    assert said.startswith(f"{checkable}: WRONG on this machine: {named[0]}: ") and "\n" not in said
    assert "pull or build it again; --no-check runs it all the same" in said


def test_half_the_precision_is_wrong(checkable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is rounded to 5 bits in place of fp16's 10."""

    def coarse(value: Any) -> Any:
        large = value.float() * (2.0**18 + 1)  # Veltkamp's splitting leaves the first bits
        return real(large - (large - value.float()))

    real = lowered.round_half
    for module in (fuse, lowered, plan, signature):
        monkeypatch.setattr(module, "round_half", coarse)
    assert wrong(found_by(checkable, "fp16"))[:1] == [LAYERS]


# Encoders.


def recorded(folder: Path, model_type: str, task: str, **changes: Any) -> Path:
    """A build of two buckets that carries what its programs must give."""
    checkpoint, chosen = tiny_encoders.write_tiny(model_type, folder / "ck", task), {"buckets": [8, 24]} | changes
    source, parts, plan = encoders.parts_of(checkpoint, folder / "again", **chosen)
    build = encoders.build(checkpoint, folder / "build", "int8", **chosen)
    packages = {name: build / f"{name}.mlpackage" for name in parts}
    checked.record(tiny.Build(source, parts, plan, packages, build / "embedding.safetensors", [0]), build)
    return checked.named(build)


@pytest.fixture(scope="module", params=["token-classification", "text-classification"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("encoder"), "bert", request.param)


@pytest.fixture(scope="module", params=["bert", "embedding_gemma2_text"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose buckets are two programs; one of them takes `embedded`."""
    task, folder = tiny_encoders.ONLY.get(request.param, "text-classification"), tmp_path_factory.mktemp("chain")
    return recorded(folder, request.param, task, topology=[[0, 1], [1, 3]])


def texts_found_by(build: Path, precision: str, spoil: Callable[[Any], None] = lambda one: None) -> list[check.Checked]:
    engine: Any = load_encoder(build, precision)
    spoil([*engine.programs[24].values()][-1])
    return [*check.check_parts(build, manifest(build), engine, precision)]


@pytest.mark.thorough(but=["text-classification-fp32", "text-classification-fp16"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_encoder_is_compared_in_each_bucket(encoder: Path, precision: str) -> None:
    found = texts_found_by(encoder, precision)
    assert [(one.name, one.status) for one in found] == [("encoder_8", check.RIGHT), ("encoder_24", check.RIGHT)]
    assert [*found[1].errors] == ["one token", "7 tokens", "a full bucket"]

    def masked(program: Any) -> None:
        one_more = Spoilt(program.models[""], inputs=one_further("attn_mask", 3))
        program.models = {"": one_more}

    found = texts_found_by(encoder, precision, masked)
    assert wrong(found) == ["encoder_24"] and "of the result away at one token, 7 tokens, at most" in found[1].said


@pytest.mark.thorough(but=["bert-fp32"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_each_program_of_a_chain_is_compared_by_itself(chain: Path, precision: str) -> None:
    found = texts_found_by(chain, precision)
    names = [f"encoder_{bucket}_{ends}" for bucket in (8, 24) for ends in ("00_01", "01_03")]
    assert [(one.name, one.status) for one in found] == [(name, check.RIGHT) for name in names]

    def masked(program: Any) -> None:
        program.models = {"": Spoilt(program.models[""], inputs=one_further("attn_mask", 3))}

    assert wrong(texts_found_by(chain, precision, masked)) == ["encoder_24_01_03"]


@pytest.mark.thorough(but=["granitemoe"])
@pytest.mark.parametrize("family", sorted(routed.GROUPS))
def test_experts_that_the_host_routes_to_are_compared_group_by_group(family: str, tmp_path: Path) -> None:
    """With inputs of a seed, and weights that take each expert of the group."""
    source = routed.checkpoint(family, tmp_path)
    build = checked.finished(routed.build(source, tmp_path / "made", routed.GROUPS[family]), tmp_path)
    experts = [part["name"] for part in manifest(build)["parts"] if part["kind"] == "experts"]
    for precision in ("fp32", "fp16"):
        found = found_by(build, precision)
        assert {one.status for one in found if one.name in experts} == {check.RIGHT} and len(experts) >= 2
        assert not wrong(found)
    assert wrong(found_by(build, "fp16", spoilt(experts[-1], inputs=one_further("weights", 1))))[0] == experts[-1]


# Programs that read caches of other parts, and drafters.


def lending(folder: Path) -> tiny.Build:
    """A Gemma 4 of which two parts read the first part's caches."""
    source = tiny.fetched(tiny_families.write_tiny("gemma4_text", folder / "checkpoint"), folder / "source")
    topology = [[0, 4], [4, 6], [6, 8]]
    return tiny.converted(source, folder, topology=topology, head={"slices": 1}, program=assistants.STATE)


def with_mtp(folder: Path) -> tiny.Build:
    """A Qwen3.5 with its MTP layer."""
    model = mtp_layers.target()
    checkpoint = mtp_layers.write(model, mtp_layers.drawn(model), folder / "checkpoint")
    return tiny.converted(tiny.fetched(checkpoint, folder / "source"), folder, **mtp_layers.SETTINGS)


def with_assistant(folder: Path) -> tiny.Build:
    """A Gemma 4 with its assistant."""
    target, helper = assistants.target(vocab=tiny.VOCAB), assistants.assistant(vocab_size=tiny.VOCAB)
    return assistants.build(folder, target, helper, "int8")


DRAFTER = list(DRAFT_PARTS)
BESIDE: dict[str, tuple[Callable[[Path], tiny.Build], list[str]]] = {
    "lent caches": (lending, ["layers_04_06", "layers_06_08"]),
    "eagle3": (tiny.build_with_head, DRAFTER),
    "mtp": (with_mtp, DRAFTER),
    "assistant": (with_assistant, DRAFTER),
}


@pytest.mark.thorough(but=["lent caches"])
@pytest.mark.parametrize("kind", BESIDE)
def test_a_program_beside_the_chain_is_compared(kind: str, tmp_path: Path) -> None:
    """By itself, and a matrix of another build's is named with its program though all digests agree."""
    make, names = BESIDE[kind]
    build = checked.finished(make(tmp_path), tmp_path)
    assert (build / checked.FILE).stat().st_size <= expected.MOST_BYTES
    for precision in ("fp32", "fp16"):
        found = {one.name: one for one in found_by(build, precision)}
        assert {name: found[name].status for name in names} == dict.fromkeys(names, check.RIGHT)
        assert {one.status for one in found.values()} == {check.RIGHT}
        assert all(found[name].errors for name in names)  # some of zero: two ways to the same bits
    for name in names:
        weights = build / f"compiled/{name}.mlmodelc/weights/weight.bin"
        sound = weights.read_bytes()
        rebuilt_weight(build, name)
        agreed(build)
        found = {one.name: one for one in found_by(build, "fp32")}
        assert [each for each in wrong([*found.values()]) if each != check.ANSWER] == [name]
        assert f"WRONG on this machine: {name}: " in check.told(build, [*found.values()])
        weights.write_bytes(sound)


# A kit.


@pytest.mark.thorough(but=[False])
@pytest.mark.parametrize("spoils", [False, True], ids=str)
def test_a_kit_feeds_what_a_check_feeds(spoils: bool, build: Path, tmp_path: Path) -> None:
    """So that its figures are the check's; and a matrix of another build's is wrong there, too."""
    checked_here = {one.name: one for one in found_by(build, "fp16") if one.name != check.ANSWER}
    if spoils:
        moved_rows(next((build / f"packages/{NEXT}.mlpackage").rglob("weight.bin")))
        agreed(build)
    write_kit([build], tmp_path / "kit.zip")
    kit = unpacked(tmp_path / "kit.zip", tmp_path / "unpacked")
    command = [sys.executable, str(kit / "measure.py"), "--engine", "portable_coreml", "--passes", "2"]
    done = subprocess.run(
        [*command, "--only", "check"], env=environment(kit, PORTABLE), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr  # every measurement has its line, a wrong one too
    found = {key: line for key, line in lines(result(kit)).items() if "/check." in key}
    jsonschema.validate(result(kit), json.loads((ROOT / "docs/device.schema.json").read_text()))
    ways = {
        f"{name}/check.{way.replace(' ', '-')}": one.errors[way]
        for name, one in checked_here.items()
        for way in one.errors
    }
    assert found.keys() == ways.keys()
    for key, line in found.items():
        is_wrong = spoils and key.startswith(NEXT)
        assert line["status"] == ("wrong" if is_wrong else "ok"), line
        if not (is_wrong or key.startswith("head")):  # of logits a check compares the largest, too
            assert line["value"]["relative_error"] == ways[key]


# Faults in a build whose digests all agree.


def changed(build: Path, **entries: Any) -> None:
    """Change entries of model.json."""
    write_json(build / "model.json", manifest(build) | entries)


def agreed(build: Path) -> None:
    """Let model.json name all files as they are now."""
    content = manifest(build)
    for entry in entries(content):
        if "files" in entry and (build / entry["path"]).is_dir() and entry["files"]:
            entry["files"] = tree_hashes(build / entry["path"])[1]
        elif "sha256" in entry:
            entry["sha256"] = hash_file(build / entry["path"])
    write_json(build / "model.json", content)


def rebuilt_weight(build: Path, name: str = NEXT) -> None:
    """The rows of the largest matrix are elsewhere, as if the program had been built from other weights."""
    moved_rows(build / f"compiled/{name}.mlmodelc/weights/weight.bin")


def moved_rows(file: Path) -> None:
    content = bytearray(file.read_bytes())
    heads = [at for at in range(64, len(content), 64) if content[at : at + 4] == bytes.fromhex("efbeadde")]
    size, at = max(struct.unpack_from("<QQ", content, head + 8) for head in heads)
    content[at : at + size] = content[at + size // 3 : at + size] + content[at : at + size // 3]
    file.unlink()  # it may be a link to the package's
    file.write_bytes(content)


def swapped_programs(build: Path) -> None:
    first, second, aside = (build / f"compiled/{name}.mlmodelc" for name in ("head_0", "head_1", "aside"))
    first.rename(aside), second.rename(first), aside.rename(second)


def another_table(build: Path) -> None:
    """The rows of the embedding table are one further."""
    tables = {name: np.roll(array, 1, 0) for name, array in load_file(build / "embedding.safetensors").items()}
    save_file(tables, build / "embedding.safetensors")


def another_rotation(build: Path) -> None:
    rope = manifest(build)["rope"]
    changed(build, rope={"rope": rope["rope"] | {"scale": rope["rope"]["scale"] * 1.1}})


IN_A_BUILD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rebuilt weight": (rebuilt_weight, NEXT),
    "a program in another's place": (swapped_programs, "head_0"),
    "another table": (another_table, check.ANSWER),
    "another rotary table": (another_rotation, LAYERS),
}


@pytest.mark.parametrize("fault", IN_A_BUILD)
def test_a_fault_in_a_build_is_found_though_all_digests_agree(
    build: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the numbers tell: with another comparison of them nothing is noticed."""
    spoil, named = IN_A_BUILD[fault]
    spoil(build)
    agreed(build)
    check_digests(build, manifest(build))
    assert wrong(found_by(build, "fp32"))[0] == named
    monkeypatch.setattr(Engine, "errors", lambda *_: {"T=1": 0.0})
    monkeypatch.setattr(Engine, "first_answer", lambda *_: "")
    assert wrong(found_by(build, "fp32")) == []


# Where programs run, and on which system.


def on_a_mac(monkeypatch: pytest.MonkeyPatch, version: str, rows: list[dict[str, str]]) -> Callable[[Engine], None]:
    """Return what makes the machine a Mac whose Core ML plans these operations, as far as a check asks it."""

    def become(engine: Engine) -> None:
        monkeypatch.setattr(check.machine, "is_portable", lambda: False)
        monkeypatch.setattr(check.machine, "macos", lambda: version)
        monkeypatch.setattr(Engine, "operations", lambda self, part: rows)
        monkeypatch.setattr(check, "MIN_WEIGHT_BYTES", 0)

    return become


def test_an_operation_off_the_neural_engine_is_named(checkable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"function": "main", "output": "hidden", "operation": "ios18.add", "device": "MLCPUComputeDevice"}
    there = row | {"status": "ane", "device": "MLNeuralEngineComputeDevice"}
    found = found_by(checkable, "fp16", on_a_mac(monkeypatch, "26.1", [there, row | {"status": "not_chosen"}]))
    assert {one.status for one in found[:-1]} == {check.ELSEWHERE} and check.verdict(found) == check.ELSEWHERE
    assert found[0].evidence == "measured" and found[0].counts == {"ane": 1, "not_chosen": 1}
    assert "; 1 of 2 operations not on the Neural Engine, first ios18.add hidden" in found[0].said
    said = check.told(checkable, found)
    assert "right, but not on the Neural Engine: layers_00_02: " in said and "`shapes: fixed`" in said


@pytest.mark.parametrize(
    ("version", "held", "off"),
    [
        ("27.0", "over the 1 GiB that macOS 27", True),
        ("26.4", "within the 2 GiB that macOS 26", False),
        ("15.3", "within the 2 GiB that macOS 15", False),
        ("28.1", "over the 1 GiB that macOS 27", True),
    ],
)
def test_a_program_over_what_this_system_takes_is_named(
    checkable: Path, monkeypatch: pytest.MonkeyPatch, version: str, held: str, off: bool
) -> None:
    """Whatever Core ML says: above the limit it runs on the CPU without a word."""
    monkeypatch.setattr(check, "_weights", lambda folder: (1 << 30) + 1)
    found = found_by(checkable, "fp16", on_a_mac(monkeypatch, version, []))
    assert (check.verdict(found) == check.ELSEWHERE) is off and held in found[0].said


def test_bundles_of_another_system_are_named(checkable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.machine, "engine", lambda: {"name": "coreml", "macos": "27.0", "build": "27A1"})
    content = manifest(checkable)
    assert check.compiled_elsewhere(content) == ""  # of the portable compiler
    for part, build in zip(content["parts"], ("27A1", "26B2", "26B2", "26B2", "27A1"), strict=True):
        part["program"]["compiler"] = {"name": "coreml", "macos": build[:2], "build": build}
    assert check.compiled_elsewhere(content) == "macOS 26 (26B2), macOS 27 (27A1)"


def test_the_last_line_says_why_nothing_could_be_compared() -> None:
    parts = [check.Checked("draft_0", check.UNTOLD, "it drafts, and changes no text; 12.0 MB")]
    assert check.told(Path("b"), parts) == (
        "b: loads, and has no results to compare with: it drafts, and changes no text"
    )
