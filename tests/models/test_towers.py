"""Towers as data: the graphs that descriptions give are transformers', and what programs can't honour is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import limits
import numpy as np
import pytest
import torch
import towers
from kit_runner.figures import relative_error

from shardmill.errors import CheckpointError
from shardmill.models.architecture import Graph, blocks
from shardmill.models.contract import GraphSpec
from shardmill.models.part_kinds import constants, inputs, tower_spec
from shardmill.models.parts import build
from shardmill.models.recurrences import written
from shardmill.models.sources import turned
from shardmill.models.tower import TowerDescription
from shardmill.models.towers import check_fractions, describe_tower, supported_towers
from shardmill.runtime.expected import grids
from shardmill.runtime.tower import places, tower_arrays

ROUNDING = limits.model(3, 4 * towers.WIDTH)


def weights_of(tower: TowerDescription, model: Any, spec: GraphSpec) -> dict[str, torch.Tensor]:
    """The constants of a tower's program by their paths, from a model's tensors."""
    held, found = model.state_dict(), {}
    for path, shape in constants(spec).items():
        (source,) = blocks(tower.sources[path])
        stored = held[source.tensor]
        flat = stored.flatten(1) if stored.ndim > 2 else stored
        found[path] = turned(flat, source).float().reshape(shape)
    return found


def test_every_tower_is_tried_here() -> None:
    """Those for images; test_sound_towers.py has the others."""
    assert {*towers.VISION, "qwen3_asr"} == set(supported_towers())


@pytest.mark.parametrize("kind", towers.VISION)
def test_the_graph_gives_transformers_rows(kind: str) -> None:
    """For every grid, in a bucket that holds it exactly and in a larger one."""
    model = towers.pictured(kind)
    tower = describe_tower(model.config)
    rules, largest = tower.architecture.host, towers.BUCKETS[kind][-1]
    for grid in grids(largest, rules):
        count = grid[0] * grid[1]
        columns = np.random.default_rng(count).standard_normal((3 * towers.PATCH**2, count)).astype(np.float32)
        with torch.no_grad():
            told = model.model.get_image_features(
                **towers.given(model, [SimpleNamespace(grid=grid, columns=columns)], rules), return_dict=True
            ).pooler_output
        expected = torch.cat([*told]).reshape(-1, model.config.text_config.hidden_size).numpy()
        for patches in {count, largest}:
            spec = tower_spec(tower.architecture, patches)
            part, arrays = build(spec, weights_of(tower, model, spec)), tower_arrays(rules, patches, columns, grid)
            assert {name: each.shape for name, each in arrays.items()} == inputs(spec)
            with torch.no_grad():
                hidden = part(*(torch.from_numpy(arrays[name]) for name in inputs(spec)))
            found = hidden[0, :, : count // tower.architecture.io.merged, 0].T.numpy()
            limits.agrees(f"{kind} {grid} of {patches}", relative_error(found, expected), ROUNDING)


def test_patches_come_in_blocks() -> None:
    assert places((2, 4), 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert places((2, 2), 1).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("bucket", [4, 8, 12, 16, 32, 64, 256, 1024, 2520])
def test_an_image_that_is_compared_does_not_fill_its_bucket_and_is_not_square(bucket: int) -> None:
    chosen = grids(bucket, {"merge": 2})
    counts = [rows * columns for rows, columns in chosen]
    assert max(counts) <= bucket and bucket in counts or bucket % 4
    assert all(extent % 2 == 0 for grid in chosen for extent in grid)
    if bucket >= 12:  # a bucket of two blocks has room for one block less
        assert counts[0] < bucket and chosen[0][0] != chosen[0][1]


def test_a_full_tile_s_patches_have_the_positions_of_their_numbers_or_are_refused() -> None:
    """transformers counts by fractions in fp32, by which many sides have two patches with one position."""
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    taken = []
    for side in range(2, 50):
        try:
            check_fractions(side)
        except CheckpointError:
            continue
        taken.append(side)
        module = SmolVLMVisionEmbeddings(SmolVLMVisionConfig(hidden_size=4, image_size=2 * side, patch_size=2))
        asked: list[torch.Tensor] = []
        module.position_embedding.register_forward_pre_hook(lambda _, args, asked=asked: asked.append(args[0]))
        with torch.no_grad():
            module(torch.zeros(1, 3, 2 * side, 2 * side), torch.ones(1, side, side, dtype=torch.bool))
        assert asked[0][0].tolist() == [*range(side * side)], side
    assert {24, 26, 27, 32} < {*taken} and len(taken) < 48  # those of published checkpoints


def vision(**changes: Any) -> Any:
    config = towers.pictured().config
    for name, value in changes.items():
        setattr(config.vision_config, name, value)
    return config


REFUSED = {
    "no tower of that kind": ({"model_type": "phi3"}, {}, "images: 'phi3' has no tower that can be built"),
    "an activation": ({}, {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu': programs have"),
    "heads of a broken width": ({}, {"num_heads": 3}, "3 heads do not divide hidden_size 64"),
    "no square of positions": ({}, {"num_position_embeddings": 35}, "a square of positions"),
    "four colours": ({}, {"in_channels": 4}, "three colours"),
    "a width that nobody has": ({}, {"hidden_size": 1 << 20}, "hidden_size is 1048576: it must be 1 to 65536"),
    "no layers": ({}, {"depth": 0}, "layers is 0: it must be 1"),
    "a null": ({}, {"hidden_size": None}, "a field of vision_config is null"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_programs_can_t_honour_is_refused_in_one_line(name: str) -> None:
    outer, inner, said = REFUSED[name]
    config = vision()
    for key, value in inner.items():
        object.__setattr__(config.vision_config, key, value)
    before = type(config).model_type
    for value in outer.values():
        type(config).model_type = value
    try:
        with pytest.raises(CheckpointError, match=said):
            describe_tower(config)
    finally:
        type(config).model_type = before


def test_a_tower_changes_no_file_of_a_part_without_one() -> None:
    """Otherwise every part of every model would be converted again."""
    graph = Graph(hidden=64, heads=4, kv_heads=2, head_dim=32, rope_dim=24, ffn=96, rms_norm_eps=1e-5)
    assert "tower" not in asdict(GraphSpec("head", graph, rows=8), dict_factory=written)
    spec = tower_spec(describe_tower(towers.pictured().config).architecture, 16)
    assert json.loads(json.dumps(asdict(spec, dict_factory=written)))["tower"]["merged"] == 4
