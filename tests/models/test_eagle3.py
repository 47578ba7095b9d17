"""A head's description from its checkpoint, in either spelling, and heads that are refused in one line each."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import heads
import limits
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from shardmill import config
from shardmill.checkpoint.headers import read_tensors
from shardmill.errors import ShardmillError
from shardmill.models.architecture import Architecture, Graph, LayerSpec, TensorSource
from shardmill.models.blocks import Layer
from shardmill.models.contract import GraphSpec
from shardmill.models.eagle3 import LAYER_IDS, default_taps, describe, load_head_config
from shardmill.models.shared import Shared


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.fetched(tiny.write_checkpoint(folder / "checkpoint"), folder / "source")


def planned(source: Path, folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts and plan of the tiny model with a head in `folder`; `changes` go into the model's config."""
    linked = folder / "source"
    linked.mkdir(exist_ok=True)
    for file in source.iterdir():
        if not (linked / file.name).exists():
            (linked / file.name).symlink_to(file)
    (linked / "drafter").unlink(missing_ok=True)
    (linked / "drafter").symlink_to(folder / "head")
    return tiny.split(linked, drafter={"path": str(folder / "head")}, **changes)


def test_a_plan_has_the_head_s_parts_and_the_taps_that_it_reads(source: Path, tmp_path: Path) -> None:
    heads.write_head(tmp_path / "head")
    parts, plan = planned(source, tmp_path)
    assert [name for name, part in parts.items() if part.drafter] == ["draft_fuse", "draft_layers", "draft_head"]
    assert {name: part.spec.taps for name, part in parts.items() if part.spec.taps} == {
        "layers_00_02": (1,)
    }  # 2, 3 begin parts
    rows = {row["name"]: row for row in plan["parts"]}
    assert rows["layers_00_02"]["taps"] == {"tap_1": 1}
    assert rows["draft_fuse"]["inputs"] == {"x": [1, 3 * tiny.HIDDEN, "T", 1]}
    assert rows["draft_layers"]["inputs"]["x"] == [1, 2 * tiny.HIDDEN, "T", 1]
    assert (rows["draft_head"]["end"], plan["drafter"]["vocab"]) == (heads.ROWS, heads.ROWS)
    assert plan["drafter"]["taps"] == [1, 2, 3]
    bits = np.frombuffer(base64.b64decode(plan["drafter"]["tokens"]), np.uint8)
    known = heads.read_head(tmp_path / "head")["t2d"].numpy()
    assert np.unpackbits(bits, bitorder="little")[: tiny.VOCAB].tolist() == known.astype(int).tolist()


def test_the_model_s_own_parts_are_those_of_a_build_without_a_head(source: Path, tmp_path: Path) -> None:
    heads.write_head(tmp_path / "head")
    (parts, plan), (plain, alone) = planned(source, tmp_path), tiny.split(source)
    assert plan["source"] == alone["source"] and plan["weights"] == alone["weights"] and "drafter" not in alone
    for name, part in plain.items():
        assert part.spec.taps == () and not part.drafter
        assert (parts[name].content == part.content) == (name != "layers_00_02")


def test_layers_0_is_the_same_as_midlayer(source: Path, tmp_path: Path) -> None:
    heads.write_head(tmp_path / "head")
    parts, _ = planned(source, tmp_path)
    renamed = {name.replace("midlayer.", "layers.0."): each.contiguous() for name, each in tensors(tmp_path).items()}
    save_file(renamed, tmp_path / "head/model.safetensors")
    again, _ = planned(source, tmp_path)
    shas = [[tensor.sha256 for tensor in found["draft_layers"].tensors] for found in (parts, again)]
    assert shas[0] == shas[1] and all(shas[0])


def test_a_config_of_the_speculators_library_says_the_same(source: Path, tmp_path: Path) -> None:
    heads.write_head(tmp_path / "head")
    parts, plan = planned(source, tmp_path)
    heads.write_head(tmp_path / "head", heads.speculators())
    again, plan_again = planned(source, tmp_path)
    assert {name: part.content for name, part in again.items()} == {name: part.content for name, part in parts.items()}
    assert plan_again["drafter"] == plan["drafter"]


def test_a_field_that_no_head_reads_changes_nothing(source: Path, tmp_path: Path) -> None:
    """AngelSlim's heads of Qwen3 hold windows of their model's config; speculators writes the kernel of training."""
    heads.write_head(tmp_path / "head")
    parts, _ = planned(source, tmp_path)
    windows = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False}
    for said in (heads.content(**windows), heads.speculators(draft_attn_kernel="auto", fc_norm=False)):
        heads.write_head(tmp_path / "head", said)
        again, _ = planned(source, tmp_path)
        assert {name: part.content for name, part in again.items()} == {n: part.content for n, part in parts.items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_before_fc": True}, "norm_before_fc is True: llama programs have no place for it"),
        ({"embed_requires_grad": True}, "embed_requires_grad is True"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type is 'eagle', not eagle3"),
        ({LAYER_IDS: [1, 2, 5]}, "[1, 2, 5]: the model has 4 layers"),
        ({LAYER_IDS: [0, 1, 2]}, "[0, 1, 2]: the model has 4 layers"),
        ({LAYER_IDS: 3}, "3: the model has 4 layers"),
        ({"transformer_layer_config": {**heads.content(), "model_type": "qwen3"}}, "no EAGLE-3 head"),
        ({"transformer_layer_config": 7}, "transformer_layer_config is 7"),
    ],
)
def test_another_config_of_that_library_is_refused(
    source: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    heads.write_head(tmp_path / "head", heads.speculators(**changes))
    with pytest.raises(ShardmillError, match=re.escape(said)):
        planned(source, tmp_path)


def test_a_head_of_some_tokens_says_which(source: Path, tmp_path: Path) -> None:
    heads.write_head(tmp_path / "head")
    save_file({n: t for n, t in tensors(tmp_path).items() if n != "d2t"}, tmp_path / "head/model.safetensors")
    with pytest.raises(ShardmillError, match="its LM head has 160 of 256 tokens, and no d2t says which"):
        planned(source, tmp_path)


def test_a_head_without_a_map_drafts_every_token(source: Path, tmp_path: Path) -> None:
    heads.write_head(tmp_path / "head", draft_vocab_size=tiny.VOCAB)
    whole = {n: t for n, t in tensors(tmp_path).items() if n not in ("d2t", "t2d")}
    whole["lm_head.weight"] = torch.randn(tiny.VOCAB, tiny.HIDDEN)
    save_file(whole, tmp_path / "head/model.safetensors")
    _, plan = planned(source, tmp_path)
    assert "tokens" not in plan["drafter"] and plan["drafter"]["vocab"] == tiny.VOCAB


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"hidden_size": 48}, "its hidden_size is 48, the model's 96: it is another model's head"),
    "another target": ({"target_hidden_size": 64}, "its target_hidden_size is 64, the model's 96"),
    "another vocabulary": ({"vocab_size": 300}, "its vocab_size is 300, the model's 256"),
    "more tokens than there are": ({"draft_vocab_size": 257}, "draft_vocab_size 257 is over the model's 256"),
    "two layers": ({"num_hidden_layers": 2}, "no EAGLE-3 head: that has a config of type llama, one layer"),
    "another type": ({"model_type": "qwen3"}, "no EAGLE-3 head"),
    "other arithmetic": ({"norm_before_fc": True}, "norm_before_fc is True: llama programs have no place"),
    "layers that are not there": ({"eagle_config": {LAYER_IDS: [0, 1, 4]}}, "the model has 4 layers"),
    "two hidden states": ({"eagle_config": {LAYER_IDS: [0, 1]}}, "a head reads 3"),
    "a norm before fc": ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True: programs have no norm"),
    "a window": ({"sliding_window": 8}, "sliding_window is 8: llama programs have no place"),
    "one hidden state": ({"eagle_config": {"use_aux_hidden_state": False}}, "a head that reads 3 hidden states"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_head_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    changes, said = REFUSED[name]
    heads.write_head(tmp_path / "head", **changes)
    with pytest.raises(ShardmillError, match=re.escape(said)):
        planned(source, tmp_path)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"d2t": torch.zeros(heads.ROWS, dtype=torch.int64).index_fill(0, torch.tensor([3]), 9)}, "not in the order"),
        ({"d2t": torch.full((heads.ROWS,), 97, dtype=torch.int64)}, "not in the order"),  # its last token is the 257th
        ({"d2t": torch.zeros(7, dtype=torch.int64)}, r"d2t is I64 \[7\], not 160 integers"),
        ({"fc.weight": torch.zeros(96, 96)}, r"fc.weight is \[96, 96\] instead of \[96, 288\]"),
        ({"midlayer.strange.weight": torch.zeros(4)}, r"1 extra \(drafter/midlayer.strange.weight\)"),
    ],
)
def test_a_damaged_head_is_refused(source: Path, tmp_path: Path, spoilt: dict[str, Any], said: str) -> None:
    heads.write_head(tmp_path / "head")
    save_file(tensors(tmp_path) | spoilt, tmp_path / "head/model.safetensors")
    with pytest.raises(ShardmillError, match=said):
        planned(source, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drafter": {}}, "drafter: give either path"),
        ({"drafter": {"path": "h"}, "witness": True}, "witness: computes the model's own parts only"),
        (
            {"drafter": {"path": "h"}, "context": None, "buckets": [8], "topology": "auto"},
            "drafter: an encoder has none",
        ),
    ],
)
def test_a_config_is_refused_before_any_work(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ShardmillError, match=said):
        config.parse({**tiny.settings("nowhere"), "tokens": {"max": 4}, **changes})


def test_the_usual_taps() -> None:
    """Of Llama 3.1 8B: vLLM's get_eagle3_aux_hidden_state_layers has (2, 16, 29)."""
    assert default_taps(32) == (2, 16, 29)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What a head's checkpoint holds."""
    return load_file(folder / "head/model.safetensors")


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_head_s_stream_has_the_units_of_its_model(tmp_path: Path, norm_first: bool) -> None:
    """The layer of a head for a model whose stream is scaled, without its attention."""
    folder = heads.write_head(tmp_path / "head", norm_before_residual=norm_first)
    plain = Graph(tiny.HIDDEN, tiny.HEADS, 1, tiny.HEAD_DIM, 24, 256, 1e-5, stream_scale=0.25)
    target = Architecture("gemma2", plain, (LayerSpec(),) * 4, tiny.VOCAB, False, {})
    found = describe(load_head_config(folder), read_tensors(folder), target, 64).model
    w = heads.read_head(folder)
    w["midlayer.self_attn.o_proj.weight"] *= 0
    weights = {
        path: source.times * w[source.tensor.removeprefix("drafter/")]
        for path, source in found.sources.items()
        if path.startswith("layers.") and isinstance(source, TensorSource)
    }
    layer = Layer(found.architecture.graph, found.architecture.kinds[0], 0, weights)
    layer.self_attn = NoAttention()
    embedded, read = torch.randn(2, 6, tiny.HIDDEN, generator=torch.Generator().manual_seed(3))
    x = torch.cat([embedded, 0.25 * read], dim=-1).T[None, :, :, None]
    out = layer(x, Shared(GraphSpec("layers", plain), {}, {}))[0, :, :, 0].T
    published = 0.25 * heads.published(w, embedded, read, norm_first)
    limits.rows_agree("the head's stream", out, published, limits.model(1, 2 * tiny.HIDDEN))


class NoAttention(torch.nn.Module):
    """A mixer that adds nothing."""

    def forward(self, z: torch.Tensor, shared: Any, caches: Any) -> torch.Tensor:
        return 0 * z[:, : tiny.HIDDEN]
