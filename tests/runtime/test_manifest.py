"""model.json is read in one place, which says in one line what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from manifests import manifest

from shardmill.convert.package import load_spec
from shardmill.errors import ShardmillError
from shardmill.records.audit import audit
from shardmill.records.finished import manifest_files
from shardmill.runtime import engine
from shardmill.runtime.kv import KVLayout
from shardmill.runtime.manifest import (
    COMPLETE,
    ENCODER,
    FEATURES,
    PART,
    RUNTIME,
    SHARED,
    UNGATED,
    Keys,
    in_context,
    of_drafter,
    read_manifest,
    reshape_frequency,
    runtime_manifest,
    verify_width,
)
from shardmill.runtime.program import Program

LAYERS: dict[str, Any] = manifest()["parts"][0] | {
    "kind": "layers",
    "inputs": {
        "x": [1, 96, "T", 1],
        "rope_cos": ["T", 1],
        "rope_sin": ["T", 1],
        "attn_mask": [1, 1, "T", 256],
        "attn_mask_sliding": [1, 1, "T", 256],
    },
}
LABELS: dict[str, Any] = manifest()["parts"][0] | {"kind": "labels", "start": 0, "end": 16, "tokens": [5, 3]}
WINDOWS = {"recurrent_read_mask": [1, 22, 32, "T"]}
RECURRENT = LAYERS | {"inputs": {name: shape for name, shape in LAYERS["inputs"].items() if name == "x"} | WINDOWS}
AROUND = {"before": "<|user|>", "after": "<|end|>"}
CHAT: dict[str, Any] = {"begin": "", "user": AROUND, "assistant": AROUND, "generate": "<|assistant|>", "stop": [3]}
WRONG: dict[str, Any] = {
    "a drafter's part without a drafter": manifest(parts=[LAYERS | {"drafter": True}]),
    "a list": [],
    "nothing": {},
    "an older format": manifest(format=1),
    "a newer format": manifest(format=3),
    "a rope without numbers": manifest(rope={"rope": {}}),
    "a rope of one table, as an older format has it": manifest(rope={"inv_freq": [1.0], "scale": 1.0}),
    "a window that is no number": manifest(window="8"),
    "a margin that is no number": manifest(margin="0.06"),
    "no word of a window": {key: value for key, value in manifest().items() if key != "window"},
    "contexts that do not ascend": manifest(contexts=[2048, 512]),
    "a context that is longer than the whole": manifest(contexts=[1 << 30]),
    "contexts that are no numbers": manifest(contexts=["8"]),
    "a part of contexts that are not named": manifest(parts=[manifest()["parts"][0] | {"contexts": {"8": {}}}]),
    "a width of decode passes that is no number": manifest(verify="4"),
    "a hint that Core ML does not have": manifest(reshape_frequency="never"),
    "parts that are none": manifest(parts=[5]),
    "no part": manifest(parts=[]),
    "no width": manifest(widths=[]),
    "a width of no tokens": manifest(widths=[0, 4]),
    "a head that takes no hidden state": manifest(parts=[manifest()["parts"][0] | {"inputs": {}}]),
    "layers that take no x": manifest(parts=[manifest()["parts"][0] | {"kind": "layers"}]),
    "an input that no runtime knows": manifest(
        parts=[manifest()["parts"][0] | {"inputs": {"hidden": [1, 96, "T", 1], "audio": [1]}}]
    ),
    "layers of another context": manifest(parts=[LAYERS], context=128),
    "a recurrence that nothing describes": manifest(parts=[RECURRENT]),
    "a recurrence of other windows": manifest(parts=[RECURRENT], recurrent={"block": 8, "taps": 3}),
    "a recurrence without taps": manifest(recurrent={"block": 8}),
    "layers of a ring that there is not": manifest(parts=[LAYERS], window_slots=7),
    "layers of another table of rope": manifest(parts=[LAYERS], rope={"rope": {"inv_freq": [1.0] * 3, "scale": 1.0}}),
    "a table of rope that is text": manifest(rope={"rope": {"inv_freq": "x", "scale": 1.0}}),
    "ends of answers that are text": manifest(eos_token_ids=["a"]),
    "a context that is true": manifest(context=True),
    "features that are text": manifest(uses="conv"),
    "systems without a version": manifest(requires={"macos": "new", "ios": "18.0"}),
    "a size that is text": manifest(tokenizer={"path": "a", "sha256": "2" * 64, "bytes": "9"}),
    "a temperature that is text": manifest(sampling={"temperature": "hot"}),
    "a mass over 1": manifest(sampling={"top_p": 2}),
    "a chat without stops": manifest(chat={key: value for key, value in CHAT.items() if key != "stop"}),
    "a chat with a number": manifest(chat=CHAT | {"begin": 1}),
    "a chat with another key": manifest(chat=CHAT | {"tools": {}}),
    "a chat that stops at text": manifest(chat=CHAT | {"stop": ["</s>"]}),
    "passes of less than a token": manifest(tokens_max=-1),
    "a window of no slots": manifest(window_slots=-1),
    **{
        f"a part without {key}": manifest(parts=[{k: v for k, v in manifest()["parts"][0].items() if k != key}])
        for key in PART
    },
    "a part of a kind that is not known": manifest(parts=[manifest()["parts"][0] | {"kind": "mixer"}]),
    "experts that no layers go before": manifest(
        parts=[manifest()["parts"][0] | {"kind": "experts", "inputs": {"weights": [1, 4, "T", 1]}}]
    ),
    "labels without tokens": manifest(parts=[{key: LABELS[key] for key in LABELS if key != "tokens"}]),
    "labels of no token": manifest(parts=[LABELS | {"tokens": []}]),
    "two labels of one token": manifest(parts=[LABELS | {"tokens": [5, 5]}]),
    "a label outside of the vocabulary": manifest(parts=[LABELS | {"tokens": [manifest()["vocab"]]}]),
    "more labels than rows": manifest(parts=[LABELS | {"tokens": [*range(17)]}]),
    "labels twice": manifest(parts=[LABELS, LABELS]),
    "labels that take no hidden state": manifest(parts=[LABELS | {"inputs": {}}]),
    "an embedding without a path": manifest(embedding={"sha256": "1" * 64}),
    "a program that is a text": manifest(parts=[manifest()["parts"][0] | {"program": "head_0.mlmodelc"}]),
    "a file outside of the build, by an absolute path": manifest(tokenizer={"path": "/etc/hostname"}),
    "a file outside of the build, from above": manifest(tokenizer={"path": "a/../../b"}),
    "a sha256 that is a number": manifest(tokenizer={"path": "a", "sha256": 5}),
    "files that are a list": manifest(packages={"head_0": {"path": "a", "files": ["b"]}}),
    **{f"{key} of another type": manifest(**{key: None}) for key in COMPLETE},
}


def refusal(build: Path, read: Any) -> str:
    with pytest.raises(ShardmillError) as caught:
        read(build)
    line = str(caught.value)
    assert line.startswith(str(build / "model.json"))
    assert "\n" not in line
    return line


def write(build: Path, content: Any) -> None:
    (build / "model.json").write_text(json.dumps(content))


def test_one_made_before_decode_passes_had_a_width_of_their_own_is_read(tmp_path: Path) -> None:
    """Decoding then took the widest."""
    write(tmp_path, {key: value for key, value in manifest().items() if key != "verify"})
    assert verify_width(read_manifest(tmp_path)) == 4
    write(tmp_path, manifest(widths=[1, 4, 64]))
    assert verify_width(read_manifest(tmp_path)) == 4


def test_one_made_before_hints_were_passed_has_the_default_of_its_programs(built: tiny.Build) -> None:
    """And one of fixed shapes has none, whatever the config says."""
    said = runtime_manifest(built.plan, {name: {} for name in built.packages}, {}, "frequent")
    assert said["reshape_frequency"] == reshape_frequency(said) == "frequent"
    older = {key: value for key, value in said.items() if key != "reshape_frequency"}
    assert reshape_frequency(older) == "infrequent"
    for functions, expected in (({"1": "t1", "4": "t4"}, ""), ({"1": "", "4": ""}, "infrequent")):
        assert reshape_frequency(older | {"parts": [{"functions": functions}]}) == expected
    assert reshape_frequency({"buckets": [128], "parts": [{}]}) == ""


def test_it_names_the_spelling_of_silu_that_is_not_the_native_one(built: tiny.Build) -> None:
    """So that a kit, a ranking and the report can tell the two builds apart."""
    graph = built.plan["architecture"]["graph"]
    tanh = {**built.plan, "architecture": {**built.plan["architecture"], "graph": graph | {"activation": "silu_tanh"}}}
    packages: Any = {name: {} for name in built.packages}
    assert "silu" not in runtime_manifest(built.plan, packages, {})
    assert runtime_manifest(tanh, packages, {})["silu"] == "tanh"


@pytest.mark.parametrize("parts", [manifest()["parts"], [LAYERS], [LABELS]])
def test_a_sound_one_is_read(tmp_path: Path, parts: list[Any]) -> None:
    write(tmp_path, manifest(parts=parts))
    assert read_manifest(tmp_path) == read_manifest(tmp_path, COMPLETE) == manifest(parts=parts)


def test_contexts_are_in_the_order_of_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has them in the order of their digits."""
    monkeypatch.setattr(Program, "_loaded", lambda _, functions: [*functions.values()])
    shorter = {str(slots): {"functions": {"1": f"c{slots}_t1"}, "inputs": {}, "states": {}} for slots in (1024, 512)}
    part = manifest()["parts"][0] | {"functions": {"1": "t1"}, "contexts": shorter}
    write(tmp_path, manifest(context=2048, contexts=[512, 1024], parts=[part]))
    (entry,) = read_manifest(tmp_path)["parts"]
    program = Program(tmp_path / "layers.mlmodelc", entry, 2048)
    assert (program.slots, [*program.lengths], program.state) == (512, [512, 1024, 2048], ["c512_t1"])


def test_keys_that_a_newer_one_has_besides_are_read_over(tmp_path: Path) -> None:
    newer = manifest(taps=[1], parts=[manifest()["parts"][0] | {"later": {}}])
    write(tmp_path, newer)
    assert read_manifest(tmp_path) == newer


def test_what_a_runtime_may_use_is_read(tmp_path: Path) -> None:
    chat = CHAT | {"system": AROUND | {"strip": True}, "without_system": "You are helpful."}
    full = manifest(chat=chat, sampling={"temperature": 0.7, "top_k": 20}, requires={"macos": "15.0", "ios": "18.0"})
    write(tmp_path, full)
    assert read_manifest(tmp_path) == full and full["uses"] == []


@pytest.mark.parametrize(
    "content", [manifest(uses=["conv", "taps"]), manifest(uses=["taps"], format=3), {"uses": ["taps"]}]
)
def test_a_build_that_uses_what_this_version_does_not_know_is_not_run(tmp_path: Path, content: Any) -> None:
    write(tmp_path, content)
    said = refusal(tmp_path, read_manifest)
    assert "the build uses taps, which this version can't run; install a newer shardmill" in said


def test_a_build_names_the_features_that_it_uses() -> None:
    plan = {"model": "m", "architecture": {"vocab": 2, "ropes": {}, "graph": {"conv_taps": 3}, "window": 8}}
    plan |= {"buckets": [], "context": 64, "tokens_max": 4, "widths": [1, 4], "verify": 4, "window_slots": 16}
    plan |= {"eos_token_ids": [], "contexts": [32], "recurrent": {"block": 8, "taps": 4, "narrow": 4}}
    plan |= {"drafter": {"kind": "eagle3"}, "adapters": 16, "tower": {}, "images": {}, "audio": {}}
    part: dict[str, Any] = {key: {} for key in PART} | {"kind": "experts", "functions": {"1": "a"}}
    part |= {"inputs": {"embedded": []}, "written": {"k_0": "k"}, "lent": ["k_1"]}
    parts = [part | {"name": "e"}, part | {"name": "l", "kind": "labels", "tokens": [1]}]
    made = runtime_manifest(plan | {"parts": parts}, {"e": {"bundles": {}}, "l": {}}, {"form": "int8"})
    others = ("causal", "encoder-chain", "dense", UNGATED)  # which encoders alone have, and no build
    assert made["uses"] == [name for name in FEATURES if name not in others]
    del plan["drafter"]
    encoder = dict.fromkeys(("task", "labels", "band", "reach", "pooling")) | {"buckets": [64]}
    made = runtime_manifest(plan | encoder | {"parts": []}, {}, {"form": "int8"})
    assert made["uses"] == ["int8-table"]
    made = runtime_manifest(plan | encoder | {"parts": [], "causal": True}, {}, {}, dense=[{"path": "source/2_Dense"}])
    assert made["uses"] == ["causal", "dense"] and made["causal"] is True
    two = [{key: {} for key in PART} | {"kind": "encoder", "name": name} for name in ("a", "b")]
    assert runtime_manifest(plan | encoder | {"parts": two}, {"a": {}, "b": {}}, {})["uses"] == ["encoder-chain"]


def test_a_head_goes_back_further_than_the_recurrence_of_its_model() -> None:
    """Its own layer is attention, so a rejected draft never makes it read the whole text again."""
    content = manifest(recurrent={"block": 8, "taps": 4}, drafter={"rope": {}})
    for found, back in ((content, False), (of_drafter(content), True)):
        host = KVLayout(found)
        for position in range(20):
            host.arrays([position], [position])
        assert host.rewindable(10) == back


def test_a_build_of_a_head_alone_has_nothing_to_run(tmp_path: Path) -> None:
    """A stranger's model.json may have no program of layers, though all else in it is right."""
    write(tmp_path, manifest())
    with pytest.raises(ShardmillError, match=r"model\.json names no program of layers"):
        engine.load(tmp_path)


def test_what_the_schema_says_of_a_stranger_s_value_is_short_and_printable(tmp_path: Path) -> None:
    for value, told in (("\x1b[2J", "is not of type"), ("x" * 9999, "does not fit type of the schema")):
        write(tmp_path, manifest(verify=value))
        said = refusal(tmp_path, read_manifest)
        assert told in said and said.isprintable() and len(said) < 400


@pytest.mark.parametrize("window", [None, 512])
def test_a_window_is_a_number_or_none(tmp_path: Path, window: int | None) -> None:
    write(tmp_path, manifest(window=window))
    assert read_manifest(tmp_path)["window"] == window


def test_it_says_of_every_program_what_a_host_of_another_make_needs(built: tiny.Build) -> None:
    """Inputs with their shapes, states, and the output: those that the package itself declares."""
    paths = {name: {"path": str(path)} for name, path in built.packages.items()}
    content = json.loads(json.dumps(runtime_manifest(built.plan, paths, {"path": str(built.table)})))
    assert content["format"] == 2
    for part in content["parts"]:
        description = load_spec(built.packages[part["name"]]).description
        shapes = {f.name: list(f.type.multiArrayType.shape) for f in description.input}  # those of one token
        assert {name: [1 if n == "T" else n for n in shape] for name, shape in part["inputs"].items()} == shapes
        assert list(part["inputs"]) == list(shapes)
        assert all(shape.count("T") == 1 for shape in part["inputs"].values())
        assert part["states"] == {s.name: list(s.type.stateType.arrayType.shape) for s in description.state}
        assert [part["output"]] == [f.name for f in description.output]
    assert content["rope"]["rope"]["inv_freq"] == list(built.plan["architecture"]["ropes"]["rope"]["inv_freq"])


@pytest.mark.parametrize("name", WRONG)
def test_one_that_is_none_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    write(tmp_path, WRONG[name])
    assert "is no manifest of a built model" in refusal(tmp_path, lambda build: read_manifest(build, COMPLETE))
    assert "build again" in refusal(tmp_path, audit)


@pytest.mark.parametrize("key", RUNTIME)
def test_the_engine_reads_no_other(tmp_path: Path, key: str) -> None:
    write(tmp_path, manifest(**{key: None}))
    assert "is no manifest of a built model" in refusal(tmp_path, engine.load)


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe", b""])
def test_a_damaged_file_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.json").write_bytes(raw)
    assert "is damaged" in refusal(tmp_path, read_manifest)


def test_where_there_is_none(tmp_path: Path) -> None:
    assert "build the model first" in refusal(tmp_path, read_manifest)
    assert "build the model first" in refusal(tmp_path / "nowhere", audit)


def test_an_entry_without_a_hash_is_not_taken_for_checked(tmp_path: Path) -> None:
    write(tmp_path, manifest(embedding={"path": "embedding.safetensors"}))
    model = manifest(embedding={"path": "embedding.safetensors"})
    said = refusal(tmp_path, lambda build: list(manifest_files(model, build / "model.json")))
    assert "no sha256 of embedding.safetensors" in said


def encoder_s(**changes: Any) -> dict[str, Any]:
    """model.json of an encoder of one part."""
    decoder = {key: value for key, value in manifest().items() if key not in {*RUNTIME} - {*SHARED}}
    part = decoder["parts"][0] | {"kind": "encoder", "inputs": {"x": [1, 96, "T", 1]}}
    return (
        decoder
        | {"parts": [part]}
        | {"task": "token-classification", "buckets": [64], "labels": ["O"], "pooling": "mean", **changes}
    )


@pytest.mark.parametrize("distance", [None, 12])
def test_how_far_tokens_of_an_encoder_see_is_a_number_or_none(tmp_path: Path, distance: int | None) -> None:
    content = encoder_s(band=distance, reach=distance)
    write(tmp_path, content)
    assert read_manifest(tmp_path, ENCODER) == read_manifest(tmp_path, COMPLETE) == content


RANKS = {"task": "text-ranking", "labels": ["no", "yes"], "pooling": "last", "template": "{query}", "instruction": "I"}
FURTHER: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": True}, "causal"),
    "a ranker": (RANKS, ""),
    "prompts": ({"prompts": {"query": "q: "}, "default_prompt": "query"}, "prompts"),
    "a projection": ({"dense": [{"path": "source/2_Dense/model.safetensors", "activation": "tanh"}]}, "dense"),
}


@pytest.mark.parametrize("name", FURTHER)
def test_what_an_encoder_s_results_are_made_of_is_read(tmp_path: Path, name: str) -> None:
    """Each key is optional, and refused by its name if its value is of another kind."""
    changes, key = FURTHER[name]
    content = encoder_s(band=None, reach=None, **changes)
    write(tmp_path, content)
    assert read_manifest(tmp_path, ENCODER) == read_manifest(tmp_path, COMPLETE) == content
    if key:
        write(tmp_path, content | {key: 5})
        assert f"manifest of a built model: {key}" in refusal(tmp_path, lambda build: read_manifest(build, ENCODER))


def test_a_projection_outside_the_build_is_refused(tmp_path: Path) -> None:
    write(tmp_path, encoder_s(band=None, reach=None, dense=[{"path": "../w.safetensors", "activation": "tanh"}]))
    assert "no valid path" in refusal(tmp_path, lambda build: read_manifest(build, ENCODER))


@pytest.mark.parametrize("key", ["band", "reach"])
@pytest.mark.parametrize("kinds", [ENCODER, COMPLETE], ids=["to run", "to verify"])
def test_an_encoder_s_without_it_is_refused(tmp_path: Path, key: str, kinds: Keys) -> None:
    sound = encoder_s(band=None, reach=None)
    for content in (sound | {key: "12"}, {name: value for name, value in sound.items() if name != key}):
        write(tmp_path, content)
        assert f"manifest of a built model: {key}" in refusal(tmp_path, lambda build: read_manifest(build, kinds))


def test_one_context_of_several_is_what_a_build_with_no_other_has() -> None:
    plain = manifest()
    part = plain["parts"][0] | {
        "inputs": {"x": [1, "T"], "attn_mask": ["T", 4]},
        "functions": {"1": "t1"},
        "states": {"k_0": [4]},
    }
    shorter = {"functions": {"1": "c1_t1"}, "inputs": {"attn_mask": ["T", 1]}, "states": {"k_0": [1]}}
    rings = {**part, "name": "rings"}  # has no functions for a shorter one
    several = manifest(contexts=[1], parts=[part | {"contexts": {"1": shorter}}, rings])
    assert in_context(several, several["context"]) == {**plain, "parts": [part, rings]}
    found = in_context(several, 1)
    assert (found["context"], "contexts" in found, found["parts"][1]) == (1, False, rings)
    assert found["parts"][0] == part | {
        "functions": {"1": "c1_t1"},
        "inputs": {"x": [1, "T"], "attn_mask": ["T", 1]},
        "states": {"k_0": [1]},
    }
