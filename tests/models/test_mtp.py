"""An MTP layer's parts as a plan has them, and models whose layer is refused in one line each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mtp_layers
import pytest
import tiny

from shardmill.config import parse
from shardmill.errors import ShardmillError
from shardmill.models.contract import states
from shardmill.pipeline.preview import preview


def written(folder: Path, kind: str = "qwen3_5_text", without: str = "-", **changes: Any) -> Path:
    """A fetched checkpoint; `without` begins the names of tensors that it lacks, `changes` go into its config."""
    model = mtp_layers.target(kind)
    held = {name: each for name, each in mtp_layers.drawn(model).items() if not name.startswith(without)}
    return tiny.fetched(mtp_layers.write(model, held, folder / "checkpoint", **changes), folder / "source")


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5"])
def test_it_has_three_programs_and_reads_the_last_hidden_state(tmp_path: Path, kind: str) -> None:
    source = written(tmp_path, kind)
    parts, plan = tiny.split(source, **mtp_layers.SETTINGS)
    assert plan["drafter"] | {"rope": {}} == {"kind": "mtp", "taps": [4], "vocab": 256, "rope": {}}
    rows = {row["name"]: row for row in plan["parts"] if row.get("drafter")}
    assert [(name, row["kind"]) for name, row in rows.items()] == [
        ("draft_fuse", "mtp"),
        ("draft_layers", "layers"),
        ("draft_head", "head"),
    ]
    assert rows["draft_fuse"]["inputs"] == {"x": [1, 3 * 64, "T", 1]}
    assert [*states(parts["draft_layers"].spec)] == ["k_0", "v_0"]
    table = {one.source.tensor for one in parts["draft_head"].tensors}
    assert table == {"mtp.norm.weight", plan["prefix"] + "embed_tokens.weight"}
    norm = next(one for one in parts["draft_fuse"].tensors if one.path == "model_norm.weight")
    assert norm.source.tensor == plan["prefix"] + "norm.weight" and norm.source.add == 1


def test_the_model_s_own_parts_are_those_of_a_build_without_it(tmp_path: Path) -> None:
    source = written(tmp_path)
    parts, plan = tiny.split(source, **mtp_layers.SETTINGS)
    plain, alone = tiny.split(source, topology=mtp_layers.SETTINGS["topology"])
    assert plan["source"] == alone["source"]
    assert all(parts[name].content == part.content for name, part in plain.items())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no layer": ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0: one layer can draft"),
    "two layers": ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2: one layer can draft"),
    "a second table": ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True: the host has"),
    "no tensors": ({"without": "mtp."}, "the checkpoint has no tensors mtp.*; take one that has, or leave out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_layer_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    changes, said = REFUSED[name]
    source = written(tmp_path, **changes)
    with pytest.raises(ShardmillError, match=re.escape(f"drafter: {said}")):
        preview(parse(tiny.settings(str(source), **mtp_layers.SETTINGS)))
    with pytest.raises(ShardmillError, match=re.escape(f"drafter: {said}")):
        tiny.split(source, **mtp_layers.SETTINGS)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = written(tmp_path, without="mtp.layers.0.self_attn.k_norm")
    with pytest.raises(ShardmillError, match=r"missing.*mtp\.layers\.0\.self_attn\.k_norm\.weight"):
        tiny.split(source, **mtp_layers.SETTINGS)


def test_a_model_of_another_family_has_none(tmp_path: Path) -> None:
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint"), tmp_path / "source")
    said = r"drafter: mtp: of a Qwen3\.5 without experts only, and this is a phi3; leave out"
    with pytest.raises(ShardmillError, match=said):
        tiny.split(source, drafter="mtp")


def test_a_preview_counts_what_a_draft_reads(tmp_path: Path) -> None:
    found = preview(parse(tiny.settings(str(written(tmp_path)), **mtp_layers.SETTINGS)))
    assert not found.refused
    assert [program.kind for program in found.programs[-3:]] == ["mtp", "layers", "head"]


@pytest.mark.parametrize("tied", [True, False])
def test_it_may_draft_the_first_tokens_alone(tmp_path: Path, tied: bool) -> None:
    """Its LM head is the first rows of the model's; all other programs are as they are without."""
    model = mtp_layers.target(tie_word_embeddings=tied)
    source = tiny.fetched(
        mtp_layers.write(model, mtp_layers.drawn(model), tmp_path / "checkpoint"), tmp_path / "source"
    )
    all_tokens, _ = tiny.split(source, **mtp_layers.SETTINGS, head={"slices": 2})
    parts, plan = tiny.split(source, **mtp_layers.SETTINGS, head={"slices": 2, "draft_vocab_size": 48})
    assert plan["drafter"]["vocab"] == 48 and "tokens" not in plan["drafter"]
    (head,) = (one for one in parts["draft_head"].tensors if one.path == "lm_head.weight")
    assert (head.rows, head.stored) == ((0, 48), (48, 64))
    same = [name for name, part in parts.items() if part.content == all_tokens[name].content]
    assert same == [name for name in parts if name != "draft_head"]
    sizes = [
        preview(parse(tiny.settings(str(source), **mtp_layers.SETTINGS, head=head))).programs[-1].weight_bytes
        for head in ({}, {"draft_vocab_size": 48})
    ]
    assert sizes[1] < sizes[0] / 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"drafter": "mtp", "head": {"draft_vocab_size": 257}},
            "head.draft_vocab_size: 257 is over the model's 256 tokens",
        ),
        ({"head": {"draft_vocab_size": 48}}, "head.draft_vocab_size: for `drafter: mtp` only"),
        ({"drafter": "mtp", "head": {"draft_vocab_size": 15}}, "head.draft_vocab_size: .*16"),
    ],
)
def test_a_draft_vocabulary_that_nothing_drafts_is_refused(tmp_path: Path, settings: Any, said: str) -> None:
    source = written(tmp_path)
    with pytest.raises(ShardmillError, match=said):
        preview(parse(tiny.settings(str(source), **settings)))
