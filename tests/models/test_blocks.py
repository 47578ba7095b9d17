"""Modules of a layer against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import limits
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from shardmill.models import family
from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.blocks import GatedMLP, ShortConv
from shardmill.models.caches import RING
from shardmill.models.contract import GraphSpec, states
from shardmill.models.part_kinds import constants, inputs, output
from shardmill.models.parts import build
from shardmill.models.shared import LayerCaches
from shardmill.runtime.kv import KVLayout

from .small_configs import FAMILIES, small_config


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module) -> nn.Module:
    """The module in inference mode with weights and biases that all matter."""
    with torch.no_grad():
        for seed, weight in enumerate(module.parameters()):
            weight.copy_(draw(*weight.shape, seed=seed) / weight.shape[-1] ** 0.5)
    return module.eval()


def graph_of(config: Any) -> Graph:
    graph: Graph = family(config.model_type).describe(config, 64).architecture.graph
    return graph


@pytest.mark.parametrize(("model_type", "theirs"), [("phi3", Phi3MLP), ("llama", LlamaMLP), ("gemma2", Gemma2MLP)])
def test_gated_mlp_is_transformers(model_type: str, theirs: Any) -> None:
    """Gate and up in one projection; in two, with biases; and with another activation."""
    config = small_config(model_type)
    module, x = filled(theirs(config)), 3 * draw(4, config.hidden_size, seed=9)
    ours = GatedMLP(graph_of(config), module.state_dict(), "")
    with torch.no_grad():
        limit = limits.sums("fp32", config.intermediate_size, 4)  # gate, activation, product, projection
        limits.rows_agree("MLP", ours(x.T[None, :, :, None])[0, :, :, 0].T, module(x), limit)


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("widths", [[9], [1] * 9, [1, 3, 2, 3]])
def test_a_short_convolution_over_its_ring_is_transformers(taps: int, widths: list[int]) -> None:
    """The ring starts with other numbers in it: before the text there are zeros."""
    config = small_config("lfm2", conv_L_cache=taps)
    theirs, x = filled(Lfm2ShortConv(config, 0)), draw(1, 9, config.hidden_size, seed=5)
    weights = theirs.state_dict()
    weights |= {f"tap_{j}": weights["conv.weight"][:, 0, j] for j in range(taps)}
    ours = ShortConv(graph_of(config), LayerSpec("conv"), weights, "").eval()
    caches = LayerCaches({"c": draw(1, 1, config.hidden_size, RING)}, hosted=False)
    host = KVLayout({"context": 64, "rope": {}, "window": None, "window_slots": 0, "conv_taps": taps})
    first, rows = 0, []
    with torch.no_grad():
        for width in widths:
            at = range(first, first + width)
            arrays = {name: torch.from_numpy(values) for name, values in host.arrays(at, at).items()}
            rows.append(ours(x[:, list(at)].transpose(1, 2)[..., None], RingMasks(arrays), caches))
            first += width
        expected = theirs(x)
    limit = limits.sums("fp32", config.hidden_size, 4)  # projection, gate, taps, projection
    limits.rows_agree("convolution", torch.cat(rows, dim=2)[..., 0].transpose(1, 2), expected, limit)


class RingMasks:
    """What a convolution asks of a part's shared values."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        self.ring_write = arrays["conv_write_mask"]
        self.ring_keep = 1 - self.ring_write.sum(dim=2, keepdim=True)
        self.ring_read = torch.split(arrays["conv_read_mask"], 1, dim=1)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_part_has_the_contract_s_constants_inputs_states_and_output(model_type: str) -> None:
    """Every parameter is a constant of the contract under its path, and takes its values and no others."""
    architecture = family(model_type).describe(small_config(model_type), 64).architecture
    layers = tuple(enumerate(architecture.kinds))[1:]
    for spec in (
        GraphSpec("layers", architecture.graph, layers, 64),
        GraphSpec("head", architecture.graph, rows=32),
    ):
        weights = {path: draw(*shape, seed=i) for i, (path, shape) in enumerate(constants(spec).items())}
        part = build(spec, weights)
        held = dict(part.named_parameters())
        assert sorted(held) == sorted(weights)
        assert all(torch.equal(held[path].flatten(), weights[path].flatten()) for path in weights)
        arguments = {name: torch.zeros([3 if n == -1 else n for n in shape]) for name, shape in inputs(spec).items()}
        with torch.no_grad():
            made = part(*arguments.values())
        assert made.shape == (1, 32 if spec.kind == "head" else architecture.graph.hidden, 3, 1)
        assert output(spec) == ("logits" if spec.kind == "head" else "hidden")
        kept = {name: tuple(buffer.shape) for name, buffer in part.named_buffers() if "." not in name}
        assert kept == states(spec)
        assert not part.training


def test_a_branch_is_scaled_before_it_is_added() -> None:
    """Granite's residual multiplier, on both branches."""
    config = small_config("granite")
    graph, kind = graph_of(config), family("granite").describe(config, 64).architecture.kinds[0]
    spec = GraphSpec("layers", graph, ((0, kind),), 64)
    weights = {path: draw(*shape, seed=i) / shape[-1] ** 0.5 for i, (path, shape) in enumerate(constants(spec).items())}
    still = replace(graph, branch_scale=0.0)
    arguments = {name: draw(*(2 if n == -1 else n for n in shape)) for name, shape in inputs(spec).items()}
    assert not torch.allclose(build(spec, weights)(*arguments.values()), arguments["x"], atol=1e-3)
    assert torch.equal(build(replace(spec, graph=still), weights)(*arguments.values()), arguments["x"])
