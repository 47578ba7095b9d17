"""The reference step writes what transformers says, and says what it can't do."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import encoders
import limits
import pytest
import tiny
import torch
from models import tiny_encoders
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from shardmill import config
from shardmill.checkpoint.headers import read_header
from shardmill.errors import CheckpointError, ConfigError, ShardmillError
from shardmill.files import write_json
from shardmill.models.contract import GraphSpec
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import perform
from shardmill.pipeline.steps import reference
from shardmill.plan import Part

POSITIONS = {"positions": 16, "perplexity_positions": 40}


@pytest.fixture
def build(built: tiny.Build, tmp_path: Path) -> Path:
    """A folder in which the steps before it have run."""
    import shutil

    shutil.copytree(built.source, tmp_path / "source")
    write_json(tmp_path / "plan.json", dict(built.plan))
    (tmp_path / "text.txt").write_text(tiny.sample_text(), encoding="utf-8")
    return tmp_path


def run(build: Path, **parity: Any) -> dict[str, torch.Tensor]:
    settings = {**POSITIONS, **parity}
    task = reference.task(
        build / "plan.json", build / "source.receipt.json", build / "text.txt", settings, {"code": "", "packages": {}}
    )
    outputs = {"states": build / "reference.safetensors"}
    perform(task, outputs, build / "reference.receipt.json", Store(build / ".store"))
    return load_file(build / "reference.safetensors")


def test_it_holds_tokens_edges_and_logits(build: Path) -> None:
    known = run(build)
    shapes = {name: tuple(tensor.shape) for name, tensor in known.items()}
    assert shapes == {"tokens": (40,), "hidden": (tiny.LAYERS + 1, 16, 96), "logits": (40, 256)}
    with torch.no_grad():
        expected = tiny.transformers_model(build / "source")(known["tokens"][None]).logits[0]
    limits.rows_agree("logits", known["logits"], expected, limits.model(tiny.LAYERS, tiny.FFN))


def changed(states: Path, folder: Path, name: str, index: int) -> Path:
    """A copy in which one row of a tensor is another."""
    tensors = load_file(states)
    tensors[name][index] += 1
    save_file(tensors, folder / "changed.safetensors")
    return folder / "changed.safetensors"


def test_a_part_sees_its_own_edges_and_a_head_the_last_one_with_the_logits(built: tiny.Build, build: Path) -> None:
    """Edges 0 to 4; parts end and begin at 2 and 3."""
    run(build)
    states, parts = build / "reference.safetensors", built.parts.values()

    def moved(name: str, index: int) -> set[str]:
        other = changed(states, build, name, index)
        programs = [part for part in parts if part.kind != "embedding"]
        return {part.name for part in programs if reference.seen(other, part) != reference.seen(states, part)}

    heads = {"head_0", "head_1"}
    assert [moved("hidden", edge) for edge in range(tiny.LAYERS + 1)] == [
        {"layers_00_02"},
        {"layers_00_02"},
        {"layers_00_02", "layers_02_03"},
        {"layers_02_03", "layers_03_04"},
        {"layers_03_04"} | heads,
    ]
    assert moved("logits", 7) == heads


def test_a_group_of_experts_sees_the_edges_of_its_layer(built: tiny.Build, build: Path) -> None:
    run(build)
    states, graph = build / "reference.safetensors", built.parts["layers_00_02"].spec.graph
    group = Part("experts_02_1", GraphSpec("experts", graph, rows=4), first=4, layer=2)
    others = [changed(states, build, "hidden", edge).rename(build / f"{edge}.safetensors") for edge in range(5)]
    assert [i for i, other in enumerate(others) if reference.seen(other, group) != reference.seen(states, group)] == [
        2,
        3,
    ]


def test_a_part_sees_the_layers_whose_caches_it_reads(built: tiny.Build, build: Path) -> None:
    """Transformers' keys and values of layer 0 follow from its input and its weights, which its output shows."""
    run(build)
    states, part = build / "reference.safetensors", built.parts["layers_03_04"]
    reader = part.changed(lent=((0, part.spec.layers[0][1]),))
    others = [changed(states, build, "hidden", edge).rename(build / f"{edge}.safetensors") for edge in range(3)]
    assert [reference.seen(other, reader) != reference.seen(states, reader) for other in others] == [True, True, False]


def test_a_part_of_an_encoder_sees_its_own_edges_and_the_last_one_the_outputs(tmp_path: Path) -> None:
    """And all of them the tokens; of an encoder in one program there are no edges."""
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint")
    names = ["tokens", "output_16", "hidden_16_1", "hidden_16_2"]
    save_file({name: torch.zeros(4) for name in names}, tmp_path / "states.safetensors")
    save_file({name: torch.zeros(4) for name in names[:2]}, tmp_path / "whole.safetensors")

    def moved(file: str, **changes: Any) -> list[set[str]]:
        _, parts, _ = encoders.parts_of(checkpoint, tmp_path / file, buckets=[16], **changes)
        states, programs = tmp_path / f"{file}.safetensors", [part for part in parts.values() if part.kind == "encoder"]
        found = []
        for name in sorted(load_file(states)):
            other = changed(states, tmp_path, name, 0)
            found.append({p.name for p in programs if reference.seen(other, p) != reference.seen(states, p)})
        return found

    first, second, third = (f"encoder_16_0{at}_0{at + 1}" for at in range(3))
    seen = moved("states", topology=[[0, 1], [1, 2], [2, 3]])
    assert seen == [{first, second}, {second, third}, {third}, {first, second, third}]  # by name
    assert moved("whole") == [{"encoder_16"}] * 2


def test_what_a_head_sees_is_hashed_a_block_at_a_time(
    built: tiny.Build, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of a large vocabulary are hundreds of MB, and `shardmill why` hashes them too."""
    run(build)
    states = build / "reference.safetensors"
    header = read_header(build, states.name)
    whole, small = reference.seen(states, built.parts["head_0"]), 1000
    reads: list[int] = []

    class Watched(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            reads.append(-1 if size is None else size)
            return super().read(size)

    def opened(file: Path, mode: str) -> Watched:
        return Watched(file, mode)

    monkeypatch.setattr(reference, "BLOCK", small)
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(reference, "read_header", lambda *_: header)
    assert reference.seen(states, built.parts["head_0"]) == whole
    assert len(reads) > 40 and max(reads) == small


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.NFC()])
def test_other_tokens_than_transformers_are_refused(
    normalizer: normalizers.Normalizer, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models are fed the same tokens, so no gate would show it.

    The parity text has nothing that NFC changes, and a conversation may: the manifest, which is made when all gates are
    through, would refuse it.
    """
    other = tiny.train_tokenizer()
    other.normalizer = normalizer
    theirs = PreTrainedTokenizerFast(tokenizer_object=other)
    monkeypatch.setattr(reference, "transformers_tokenizer", lambda source: theirs)
    with pytest.raises(CheckpointError, match=r"source/tokenizer\.json: gives a text other tokens than transformers' "):
        run(build)


def test_no_more_tokens_than_the_context_holds(build: Path) -> None:
    assert len(run(build, perplexity_positions=1000)["tokens"]) == tiny.CONTEXT


def test_a_text_that_is_too_short_is_named(build: Path) -> None:
    (build / "text.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"text\.txt: 1 tokens, parity\.positions asks for 16"):
        run(build)


def test_more_positions_than_the_context_are_not_blamed_on_the_text() -> None:
    """Said before any work, and of the right key."""
    content = tiny.settings("checkpoint", parity={"positions": tiny.CONTEXT + 1})
    with pytest.raises(ConfigError, match=rf"parity\.positions.* context of {tiny.CONTEXT}"):
        config.parse(content)


def test_a_checkpoint_without_a_tokenizer_is_one_clear_error(build: Path) -> None:
    (build / "source" / "tokenizer.json").unlink()
    with pytest.raises(ShardmillError, match=r"tokenizer\.json"):
        run(build)


@pytest.mark.parametrize("content", ["{}", "", "no JSON"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    """The tokenizers library raises a bare Exception."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/tokenizer.json can't be read as a tokenizer"):
        reference.encode(tmp_path, tmp_path / "text.txt")


def test_a_text_that_is_not_utf8_is_named(built: tiny.Build, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"^{tmp_path}/text.txt: not UTF-8 text$"):
        reference.encode(built.source, tmp_path / "text.txt")


def test_buckets_and_answers_of_an_encoder_decide_the_result(tmp_path: Path) -> None:
    """The same checkpoint is compared on other passages, or with other rows of its LM head."""
    (tmp_path / "text.txt").write_text("text")
    plan = {"source": "0", "context": 64, "buckets": [64], "task": "text-ranking", "head": "lm_head", "answers": [5, 7]}
    keys, cut = set(), [{"kind": "encoder", "start": start} for start in (0, 2)]
    others = ({"buckets": [16, 64]}, {"answers": [7, 5]}, {"head": "embedding"}, {"task": "labels"}, {"parts": cut})
    for changes in ({}, *others):
        write_json(tmp_path / "plan.json", plan | changes)
        file = tmp_path / "plan.json", tmp_path / "source.receipt.json", tmp_path / "text.txt"
        task = reference.task(*file, POSITIONS, {"code": "", "packages": {}})
        assert task.action is not None
        keys.add(task.action.key)
    assert len(keys) == 6
