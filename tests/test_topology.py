"""Which layers and rows make up each program: never more than one may hold, as few as fit, and even."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from portable_coreml.judge import limits as of_systems

from shardmill import config, plan, topology, weight_files
from shardmill.convert import stamped
from shardmill.errors import ConfigError
from shardmill.forms.recipe import recipe
from shardmill.models import family
from shardmill.models.architecture import SLIDING_MASK, Architecture, Experts, Graph, LayerSpec, ModelDescription
from shardmill.models.contract import cache_bytes
from shardmill.models.eagle3 import DrafterDescription
from shardmill.models.hf_config import load_hf_config
from shardmill.models.part_kinds import constants, model_constants, table_constants, tower_spec, whole_spec
from shardmill.models.tower import Step, TowerArchitecture, TowerIO

PHI = Architecture("phi3", Graph(3072, 24, 8, 128, 96, 8192, 1e-5, fused=True), (LayerSpec(),) * 32, 200064, True, {})
COMMIT = "0" * 40


def settings(**changes: Any) -> config.Config:
    """A config for a checkpoint on the hub."""
    content = {"model": "m", "source": {"repo": "a/b", "revision": COMMIT}, "context": 2048}
    return config.parse(content | changes)


OLDER = {"runs_on": ["macOS 15", "macOS 26"]}  # which take twice what the newest systems take


def limited(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let every system take weight files of so many bytes."""
    changed = tuple(replace(limit, most=most) for limit in of_systems.WEIGHT_BYTES)
    monkeypatch.setattr(of_systems, "WEIGHT_BYTES", changed)


def refusal(a: Architecture, **changes: Any) -> str:
    """The line that refuses to build a model so."""
    with pytest.raises(ConfigError) as caught:
        topology.resolve_topology(settings(**changes), a)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_phi_4_mini_is_four_parts_and_the_four_slices_that_are_known_to_run() -> None:
    """Of 8 layers for all systems, of 16 where macOS 26 is the newest; in fp16, of half as many."""
    chosen = topology.resolve_topology(settings(), PHI)
    assert chosen.ranges == ((0, 8), (8, 16), (16, 24), (24, 32))
    assert chosen.slices == 4
    assert topology.resolve_topology(chosen, PHI) == chosen
    older = topology.resolve_topology(settings(program=OLDER), PHI)
    assert (older.ranges, older.slices) == (((0, 16), (16, 32)), 4)
    half = {"convert": {"weights": "fp16"}}
    assert topology.resolve_topology(settings(**half, program=OLDER), PHI).ranges == chosen.ranges
    assert {end - start for start, end in topology.resolve_topology(settings(**half), PHI).ranges} == {4, 5}


def test_too_many_layers_in_a_part_are_refused_with_a_topology_that_fits() -> None:
    """24 of Phi-4-mini's layers left the Neural Engine, 20 of them are resident."""
    line = refusal(PHI, topology=[[0, 32]])
    assert line == (
        "topology: layers_00_32 holds 3223408704 bytes of weights, the limit is 2147483648 (rule W1); "
        "[[0, 8], [8, 16], [16, 24], [24, 32]] fits"
    )
    line = refusal(PHI, topology=[[0, 32]], program=OLDER)
    assert line.endswith("the limit is 2147483648 (rule W1); [[0, 16], [16, 32]] fits")
    assert refusal(PHI, topology=[[0, 8], [8, 32]]).startswith("topology: layers_08_32 holds")
    topology.resolve_topology(settings(topology=[[0, 20], [20, 24], [24, 30], [30, 32]]), PHI)
    topology.resolve_topology(settings(topology=[[0, 21], [21, 32]]), PHI)
    assert refusal(PHI, topology=[[0, 22], [22, 32]]).startswith("topology: layers_00_22 holds")


def sized(chosen: config.Config) -> dict[str, int]:
    """The bytes of Phi-4-mini's programs."""
    parts = plan.empty_parts(chosen, PHI)[:-1]
    return {part.name: weight_files.file_bytes(part.named_shapes, chosen.convert.recipe) for part in parts}


def test_what_only_older_systems_take_is_built_with_a_warning_unless_a_newer_one_is_named() -> None:
    """The split that is known to be resident on macOS 26."""
    ranges = {"topology": [[0, 20], [20, 24], [24, 30], [30, 32]]}
    chosen = topology.resolve_topology(settings(**ranges), PHI)
    assert weight_files.warnings(chosen, sized(chosen)) == [
        "layers_00_20: expected on the CPU on macOS 27, iOS 18 and iOS 27, whose limit is 1073741824 bytes of weights "
        "(rule W1); smaller parts run on the Neural Engine everywhere, or `program.runs_on: [macOS 15, macOS 26]` "
        "names only systems that take it"
    ]
    older = topology.resolve_topology(settings(**ranges, program=OLDER), PHI)
    assert weight_files.warnings(older, sized(older)) == []
    assert refusal(PHI, **ranges, program={"runs_on": ["macOS 15", "macOS 27"]}) == (
        "topology: layers_00_20 holds 2014630464 bytes of weights, the limit is 1073741824 on macOS 27 (rule W1); "
        "[[0, 8], [8, 16], [16, 24], [24, 32]] fits, or `program.runs_on: [macOS 15, macOS 26]` names only systems "
        "that take it"
    )
    newest = refusal(PHI, **ranges, program={"runs_on": ["macOS 27", "macOS 27"]})
    assert newest.endswith("the limit is 1073741824 (rule W1); [[0, 8], [8, 16], [16, 24], [24, 32]] fits")


def test_no_part_that_is_chosen_here_is_over_the_limit_of_a_system() -> None:
    for program in ({}, OLDER, {"runs_on": ["iOS 18", "iOS 26"]}, {"runs_on": ["macOS 27", "macOS 27"]}):
        chosen = topology.resolve_topology(settings(program=program), PHI)
        assert max(sized(chosen).values()) <= weight_files.weight_limit(chosen).most
        assert weight_files.warnings(chosen, sized(chosen)) == []


def test_the_limit_itself_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is on files over it: one byte less room and the same parts are refused, and others proposed."""
    half = topology.resolve_topology(settings(program=OLDER), PHI)
    size = weight_files.file_bytes(constants(plan.empty_parts(half, PHI)[0].spec), recipe("int8"))
    limited(monkeypatch, size)
    assert topology.resolve_topology(settings(program=OLDER), PHI) == topology.resolve_topology(half, PHI) == half
    limited(monkeypatch, size - 1)
    assert refusal(PHI, topology=half.ranges).endswith("[[0, 11], [11, 22], [22, 32]] fits")
    assert topology.resolve_topology(settings(), PHI).ranges == ((0, 11), (11, 22), (22, 32))


def test_constants_that_the_program_itself_holds_take_no_room_in_the_weight_file() -> None:
    """coremltools writes constants of fewer than ten numbers into the program."""
    assert weight_files.file_bytes({"sinks": (9,)}, recipe("int8")) == 64
    assert weight_files.file_bytes({"sinks": (10,)}, recipe("int8")) == 64 + 64 + 64


def test_a_head_that_is_too_large_is_refused_with_a_number_that_fits() -> None:
    large = replace(PHI, graph=replace(PHI.graph, hidden=12288))
    alone = {"topology": [[i, i + 1] for i in range(32)]}
    line = refusal(large, head={"slices": 1}, **alone)
    assert line == (
        "head.slices: head_0 holds 2458811392 bytes of weights, the limit is 2147483648 (rule W1); 4 slices fit"
    )
    topology.resolve_topology(settings(head={"slices": 2}, **alone), large)
    line = refusal(large, head={"slices": 2}, program={"runs_on": ["iOS 18", "iOS 26"]}, **alone)
    assert line == (
        "head.slices: head_0 holds 1229418112 bytes of weights, the limit is 1073741824 on iOS 18 (rule W2); "
        "4 slices fit, or `program.runs_on: [iOS 26, iOS 26]` names only systems that take it"
    )


def test_a_layer_that_is_too_large_alone_is_refused() -> None:
    """Whatever the topology; fewer bits are a remedy while there are any."""
    wide = replace(PHI, kinds=(LayerSpec(mixer="conv"), LayerSpec()), graph=replace(PHI.graph, ffn=1 << 18))
    for asked in ({}, {"topology": [[0, 2]]}):
        assert refusal(wide, **asked).startswith("topology: layer 0 alone holds 2454760128 bytes")
        assert refusal(wide, **asked).endswith("INT4 halves them")
    half = refusal(wide, convert={"precision": "fp16"})
    assert half.endswith("INT8 halves them")
    twice = replace(wide, graph=replace(wide.graph, ffn=1 << 19))
    assert refusal(twice, convert={"precision": "int4"}).endswith("this model can't be built")


@pytest.mark.parametrize(
    ("change", "asked", "expected"),
    [
        ({}, {"topology": [[0, 31]]}, "topology: ends at layer 31, the model has 32"),
        ({}, {"topology": [[0, 33]]}, "topology: ends at layer 33, the model has 32"),
        ({}, {"head": {"slices": 5}}, "head.slices: 5 does not divide the vocabulary of 200064; 4 or 6 would"),
        ({"vocab": 7}, {"head": {"slices": 9}}, "head.slices: 9 does not divide the vocabulary of 7; 7 would"),
    ],
)
def test_what_the_model_contradicts_is_named(change: dict[str, Any], asked: dict[str, Any], expected: str) -> None:
    assert refusal(replace(PHI, **change), **asked) == expected


@pytest.mark.parametrize(
    ("tokens", "context", "program", "fitting"),
    [
        (64, 16384, {}, 63),
        (64, 16384, {"shapes": "enumerated", "state": "host"}, 63),
        (64, 16383, {}, 0),
        (63, 16384, {}, 0),
        (4, 262144, {}, 3),
        (64, 16384, {"shapes": "fixed"}, 0),
    ],
)
def test_a_pass_with_more_scores_than_are_computed_rightly_is_refused(
    tokens: int, context: int, program: dict[str, str], fitting: int
) -> None:
    """Where widths are flexible, at the largest; programs of fixed widths divide them."""
    asked = settings(tokens={"max": tokens}, context=context, parity={"positions": 64}, program=program)
    found = topology.misfits(asked, PHI)
    assert [line.partition("; ")[2].partition(" or fewer fit")[0] for line in found] == [f"{fitting}"] * bool(fitting)
    for line in found:
        assert line.startswith(
            f"tokens.max: {tokens} tokens x {context} slots are {tokens * context} scores for a head"
        )
        assert line.endswith("or add `program.shapes: fixed`, whose programs divide them")


def test_short_windows_have_few_scores() -> None:
    """The rings of sliding layers are all that their queries meet."""
    sliding = replace(PHI, window=512, kinds=(LayerSpec(mask="attn_mask_sliding"),) * 4)
    asked = settings(tokens={"max": 64}, context=1 << 17, parity={"positions": 64})
    assert topology.misfits(asked, sliding) == []
    assert topology.misfits(asked, replace(sliding, kinds=(*sliding.kinds, LayerSpec())))


def test_a_state_that_the_neural_engine_does_not_take_is_refused() -> None:
    """A model without attention has no such state; ZAYA's convolved attention has one."""
    narrow = replace(PHI, graph=replace(PHI.graph, head_dim=48, conv_taps=3))
    for kinds in (narrow.kinds, (LayerSpec(mixer="cca"),) * 4):
        line = refusal(replace(narrow, kinds=kinds))
        assert line.startswith("head_dim 48: a key/value state whose width is no multiple of 32")
    topology.resolve_topology(settings(), replace(narrow, kinds=(LayerSpec(mixer="conv"),) * 4))


TYPES = (["sliding_attention"] * 4 + ["full_attention"]) * 7
E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": TYPES,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}


def gemma4(**changes: Any) -> Architecture:
    """Gemma 4 E2B's description, as its published config.json has the numbers, at a context of 2048."""
    from transformers import AutoConfig

    hf = AutoConfig.for_model("gemma4_text", **E2B | changes)
    found: Architecture = family("gemma4_text").describe(hf, 2048).architecture
    return found


def test_gemma_4_e2b_has_the_sizes_that_its_publisher_gives() -> None:
    """All 35 layers fit one program: 1.88 G parameters, beside 0.40 G of the table and 2.35 G of the second one."""
    a = gemma4()
    chosen = topology.resolve_topology(settings(program=OLDER), a)
    assert (chosen.ranges, chosen.slices) == (((0, 35),), 4)
    layers = sum(n for path, shape in model_constants(a).items() if path.startswith("layers.") for n in [prod(shape)])
    assert round(layers / 1e9, 2) == 1.88
    assert {path: prod(shape) for path, shape in table_constants(a).items()} == {
        "embedding": 262144 * 1536,
        "per_layer": 262144 * 35 * 256,
    }
    (part, *_) = plan.empty_parts(chosen, a)
    assert cache_bytes(part.spec) == 12 * 2 * 2 * 544 * 256 + 3 * 2 * 2 * 2048 * 512


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        ([[0, 14], [14, 35]], "layer 15 reads the cache of layer 13, which would be in another part"),
        ([[0, 15], [15, 35]], "layer 15 reads the cache of layer 13, which would be in another part"),
        ([[0, 13], [13, 34], [34, 35]], "layer 34 reads the cache of layer 14, which would be in another part"),
    ],
)
def test_layers_stay_in_the_part_of_the_cache_that_they_read(topology: list[list[int]], why: str) -> None:
    line = refusal(gemma4(), topology=topology, program=OLDER)
    assert line == f"topology: {why}; [[0, 35]] keeps such layers together"


def test_entry_points_are_those_that_a_part_has_a_use_for() -> None:
    """Shorter contexts belong to layers that keep all slots, and adapters to layers of the model, not of a drafter."""
    sliding = LayerSpec(mask=SLIDING_MASK)
    a = replace(PHI, kinds=(*[sliding] * 16, *PHI.kinds[:16]), window=64)
    drafter = DrafterDescription(ModelDescription(replace(PHI, kinds=(LayerSpec(),)), {}), (2, 16, 29), mapped=False)
    form = {"shapes": "fixed", "contexts": [512], "adapters": 4} | OLDER
    chosen = topology.resolve_topology(settings(program=form), a)
    parts = [*plan.empty_parts(chosen, a, drafter)]
    found = {one.name: (one.spec.calls.contexts, one.spec.calls.adapters) for one in parts if one.spec.layers}
    assert found == {"layers_00_16": ((), 4), "layers_16_32": ((512,), 4), "draft_layers": ((512,), 0)}


def test_parts_before_the_caches_that_are_read_may_be_cut_anywhere() -> None:
    ranges = [[0, 5], [5, 12], [12, 13], [13, 35]]
    assert topology.resolve_topology(settings(topology=ranges), gemma4()).ranges == tuple(map(tuple, ranges))


def test_with_caches_on_the_host_layers_without_a_cache_are_parts_of_their_own() -> None:
    """So a prompt may leave them out."""
    host = {"state": "host"} | OLDER
    chosen = topology.resolve_topology(settings(program=host), gemma4())
    assert chosen.ranges == ((0, 15), (15, 35))
    first, second, *_ = plan.empty_parts(chosen, gemma4())
    assert not first.spec.lent and [i for i, _ in second.spec.lent] == [13, 14] and cache_bytes(second.spec) == 0
    further = settings(program=host, topology=[[0, 15], [15, 20], [20, 35]])
    assert topology.resolve_topology(further, gemma4()).ranges == ((0, 15), (15, 20), (20, 35))
    line = refusal(gemma4(), program=host, topology=[[0, 14], [14, 35]])
    assert line == (
        "topology: layer 15 reads the cache of layer 13, which would be in another part; "
        "[[0, 15], [15, 35]] keeps such layers together"
    )


def test_layers_that_share_caches_and_are_too_large_together_are_refused() -> None:
    """E2B's in fp16, and in INT8 for systems of 1 GiB, with both remedies; the host's caches let them be cut."""
    half = {"convert": {"precision": "fp16"}}
    line = refusal(gemma4(), **half)
    assert line.startswith("topology: the block of layers 13 to 34, which share caches, holds 2774987200 bytes")
    assert line.endswith("the limit is 2147483648 (rule W1); `program.state: host` cuts it")
    line = refusal(gemma4())
    assert line.startswith("topology: the block of layers 13 to 34, which share caches, holds 1389103808 bytes")
    assert line.endswith(
        " of weights, the limit is 1073741824 on macOS 27, iOS 18 and iOS 27 (rule W1); "
        "`program.state: host` cuts it, or `program.runs_on: [macOS 15, macOS 26]` names only systems that take it"
    )
    for changes in ({}, half):
        chosen = topology.resolve_topology(settings(program={"state": "host"}, **changes), gemma4())
        parts = plan.empty_parts(chosen, gemma4())[:-1]
        assert max(weight_files.file_bytes(p.named_shapes, chosen.convert.recipe) for p in parts) <= 1 << 30


def test_a_calibration_runs_layers_one_by_one() -> None:
    text = {"text": "resources/text/parity.txt"}
    line = refusal(gemma4(), convert={"precision": "int4", "calibration": text})
    assert line == "convert.calibration: gemma4_text has layers that can't be run one by one; leave it out"


@pytest.mark.parametrize(
    ("vocab", "expected"),
    [
        (32000, 1),
        (65536, 1),
        (65537, 1),  # a prime: its only other divisor is one slice for each row
        (128256, 2),
        (151936, 4),
        (262144, 4),
        (2 * 65537, 1),  # two slices are over the limit of an extent as well, and the next number is 65537
    ],
)
def test_slices_are_as_few_as_an_extent_allows(vocab: int, expected: int) -> None:
    chosen = topology.resolve_topology(settings(), replace(PHI, vocab=vocab))
    assert chosen.slices == expected
    assert vocab % chosen.slices == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(9, 20))
def test_no_other_sharing_is_better(sizes: list[int], limit: int) -> None:
    """Against all that there are: none has fewer parts within the limit, or as many that are more even."""
    found = topology.share_layers(sizes, limit)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == len(sizes)
    assert cost(found, sizes, limit) == min(cost(other, sizes, limit) for other in sharings(len(sizes)))


def cost(ranges: Sequence[tuple[int, int]], sizes: Sequence[int], limit: int) -> tuple[bool, int, int]:
    """Whether a sharing breaks the limit, its number of parts, and how uneven they are."""
    sums = [sum(sizes[start:end]) for start, end in ranges]
    return max(sums) > limit, len(sums), sum(size**2 for size in sums)


def sharings(count: int) -> list[list[tuple[int, int]]]:
    """Every way to cut `count` layers into consecutive ranges."""
    cuts = [cut for k in range(count) for cut in combinations(range(1, count), k)]
    return [list(zip((0, *cut), (*cut, count), strict=True)) for cut in cuts]


def test_the_first_parts_are_the_larger_ones() -> None:
    assert topology.share_layers([1] * 10, 3) == ((0, 3), (3, 6), (6, 8), (8, 10))


@pytest.mark.parametrize("quantization", ["int8", "fp16"])
def test_the_size_of_a_program_is_that_of_its_weight_file(tmp_path: Path, quantization: str) -> None:
    """To the byte: scales, records and padding count, for the file is what is over the limit or not."""
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint"), tmp_path / "source")
    parts, _ = tiny.split(source, convert={"weights": quantization})
    for name in ("layers_00_02", "head_1"):
        package = tiny.convert(parts[name], source, tmp_path / f"{name}.mlpackage", quantization)
        expected = weight_files.file_bytes(constants(parts[name].spec), recipe(quantization))
        assert (package / stamped.WEIGHT_FILE).stat().st_size == expected


def test_parts_of_a_plan_are_those_of_the_topology() -> None:
    chosen = topology.resolve_topology(settings(program=OLDER), PHI)
    parts = plan.empty_parts(chosen, PHI)
    assert [(p.name, p.start, p.end) for p in parts][:3] == [
        ("layers_00_16", 0, 16),
        ("layers_16_32", 16, 32),
        ("head_0", 0, 50016),
    ]


def expert_model(**experts: Any) -> Architecture:
    """Ten layers of the width of ZAYA1-8B, of which the first two have no experts."""
    chosen = Experts(**{"count": 16, "chosen": 1, "ffn": 2048, "routed": True, **experts})
    kinds = (LayerSpec(),) * 2 + (LayerSpec(ffn="experts"),) * 8
    return replace(PHI, kinds=kinds, graph=replace(PHI.graph, hidden=2048, experts=chosen))


def test_routed_experts_cut_the_layers_and_are_grouped_by_the_least_that_earns_a_dispatch() -> None:
    """One expert has 12.6 MB, and two have more than rule W5 asks for."""
    chosen = topology.resolve_topology(settings(experts="routed"), expert_model())
    assert chosen.ranges == ((0, 3), *((i, i + 1) for i in range(3, 10)))
    assert chosen.groups == 8
    assert chosen.parts[:10] == ("layers_00_03", *(f"experts_02_{j}" for j in range(8)), "layers_03_04")
    assert topology.resolve_topology(settings(experts="routed"), expert_model(ffn=2560)).groups == 16
    assert topology.resolve_topology(settings(experts="routed"), expert_model(ffn=16)).groups == 1
    assert topology.resolve_topology(settings(experts="routed"), expert_model(count=128, group=16)).groups == 8


def test_a_layer_whose_experts_fit_no_program_is_routed_to_in_as_few_groups_as_fit() -> None:
    """16 experts of a width that makes a layer 1.2 GB; the config's own choice of experts or parts is kept."""
    large = expert_model(ffn=12288, routed=False)
    whole = topology.with_fitting_experts(settings(), large)
    assert whole.experts == 2
    resolved = topology.resolve_topology(whole, replace(large, graph=expert_model(ffn=12288).graph))
    assert (resolved.groups, resolved.ranges[0]) == (2, (0, 3))
    assert topology.with_fitting_experts(settings(convert={"precision": "fp16"}), large).experts == 4
    for kept in ({"program": OLDER}, {"experts": 4}, {"topology": [[0, 10]]}, {"convert": {"precision": "int4"}}):
        assert topology.with_fitting_experts(settings(**kept), large) == settings(**kept)
    assert topology.with_fitting_experts(settings(), replace(large, kinds=(*large.kinds, LayerSpec()))) == settings()
    assert topology.with_fitting_experts(settings(), PHI) == settings()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"experts": 3}, "experts: 3 does not divide a layer's 16 experts; 1 or 2 or 4 or 8 or 16 would"),
        (
            {"experts": 4, "topology": [[0, 10]]},
            "topology: with experts routed a part ends at each layer that has them",
        ),
    ],
)
def test_what_routed_experts_contradict_is_named(asked: dict[str, Any], expected: str) -> None:
    assert refusal(expert_model(), **asked).startswith(expected)


def test_a_model_that_goes_on_after_its_experts_is_refused() -> None:
    a = expert_model()
    for other in (replace(a, kinds=(*a.kinds, LayerSpec())), replace(a, graph=replace(a.graph, post_norms=True))):
        assert refusal(other, experts="routed").endswith("can't end with its experts' sum; take `dense`")


SEARCH = {"precision": "search", "calibration": {"text": "a.txt"}, "budget": {"perplexity": 1.03}}


def test_a_search_is_planned_by_the_largest_form_that_it_may_take() -> None:
    """What it chooses is known only later; whatever that is, it fits the parts."""
    int8, fp16 = (settings(convert={"precision": name}) for name in ("int8", "fp16"))
    few, all_forms = (settings(convert=SEARCH | {"search": {"forms": f}}) for f in (["palette6"], ["int4", "fp16"]))
    assert topology.resolve_topology(few, PHI).ranges == topology.resolve_topology(int8, PHI).ranges
    assert topology.resolve_topology(all_forms, PHI).ranges == topology.resolve_topology(fp16, PHI).ranges


def test_forms_of_which_none_fits_a_matrix_are_refused() -> None:
    text = refusal(PHI, convert=SEARCH | {"search": {"forms": ["palette4/7"]}})
    assert re.match(r"convert.search.forms: palette4/7: none of them fits layers\.0\.\S+, \[\d+, \d+\]; add int8", text)


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ({"bits_per_weight": 4.001}, r"convert\.budget\.bits_per_weight: 4\.001 is less .*: with int4 it is 4\.004"),
        (
            {"bytes_per_token": 10**9},
            r"convert\.budget\.bytes_per_token: 1000000000 is less than .*: with int4 it is 1920\d+ at least",
        ),
    ],
)
def test_a_budget_out_of_reach_is_told_before_anything_is_calibrated(budget: dict[str, float], told: str) -> None:
    """By the smallest form of each matrix and the whole head, however many slices it has."""
    convert = {"precision": "search", "search": {"forms": ["int4"]}, "calibration": {"text": "t"}}
    for head in ({}, {"slices": 8}):
        assert re.match(told, refusal(PHI, convert=convert | {"budget": budget}, head=head))
    ((name, limit),) = budget.items()
    enough = {name: limit * 1.01 if name == "bits_per_weight" else 2 * limit}
    assert topology.misfits(settings(convert=convert | {"budget": enough}), PHI) == []


def test_groups_that_fit_the_head_but_not_its_slices_are_refused(tmp_path: Path) -> None:
    """How many slices there are is known only once they are proposed: 64 divides 200,064 rows, and not 50,016."""
    recipe_file = tmp_path / "recipe.json"
    forms = {"schema": 1, "default": "int8", "matrices": {"lm_head.weight": "palette4/64"}}
    recipe_file.write_text(json.dumps(forms))
    text = refusal(PHI, convert={"precision": str(recipe_file)})
    assert text.startswith("convert.precision: lm_head.weight: palette4/64: its 50016 output channels do not divide")
    one = settings(convert={"precision": str(recipe_file)}, head={"slices": 1})
    assert topology.misfits(one, PHI) == []


@pytest.mark.parametrize(("window", "least"), [(500, 512), (None, 4), (4096, 4)])
def test_a_context_that_is_no_longer_than_the_ring_of_sliding_layers_is_refused(window: int | None, least: int) -> None:
    """There they would have other caches. A window beyond the whole context makes no rings."""
    sliding = replace(PHI, window=window)
    ascending = {"shapes": "fixed", "contexts": [least, least + 1]}
    found = topology.misfits(settings(program=ascending), sliding)
    line = f"program.contexts: {least} is too short for the window of {window}, for which sliding layers keep 512 slots"
    assert found == ([f"{line}; name longer ones"] if window == 500 else [])
    assert topology.misfits(settings(program=ascending | {"contexts": [513]}), sliding) == []


# Encoders.


FILTER = Path(__file__).parents[1] / "resources/privacy-filter/config.json"


def privacy_filter() -> Architecture:
    """OpenAI's privacy filter, of eight layers, as it is published."""
    made: ModelDescription = family("openai_privacy_filter", "encoder").describe(load_hf_config(FILTER.parent), 520)
    return made.architecture


def encoder(**changes: Any) -> config.Config:
    content = {"model": "m", "source": {"repo": "a/b", "revision": COMMIT}, "buckets": [128, 520]}
    return config.parse(content | changes)


@pytest.mark.parametrize(
    ("changes", "ranges"),
    [
        ({"program": OLDER}, ((0, 8),)),
        ({}, ((0, 4), (4, 8))),
        ({"convert": {"precision": "fp16"}}, ((0, 3), (3, 6), (6, 8))),
        ({"topology": [[0, 5], [5, 8]]}, ((0, 5), (5, 8))),
    ],
)
def test_an_encoder_is_as_few_programs_for_a_bucket_as_fit_its_systems(changes: Any, ranges: Any) -> None:
    """The first and the last hold what stands before and after the layers; together they are the encoder."""
    a = privacy_filter()
    chosen = topology.resolve_topology(encoder(**changes), a)
    assert chosen.ranges == ranges and chosen == topology.resolve_topology(chosen, a)
    *programs, _ = plan.empty_parts(chosen, a)
    assert [part.spec.tokens for part in programs] == [size for size in (128, 520) for _ in ranges]
    for size in (128, 520):
        own = [part for part in programs if part.spec.tokens == size]
        assert {path: shape for part in own for path, shape in part.shapes.items()} == constants(whole_spec(a))
        assert sum(len(part.shapes) for part in own) == len(constants(whole_spec(a)))
    sizes = [weight_files.file_bytes(part.named_shapes, chosen.convert.recipe) for part in programs]
    assert max(sizes) <= weight_files.weight_limit(chosen).most


def test_an_encoder_in_one_program_keeps_its_name_and_its_content() -> None:
    a = privacy_filter()
    *programs, _ = plan.empty_parts(topology.resolve_topology(encoder(program=OLDER), a), a)
    assert [part.name for part in programs] == ["encoder_128", "encoder_520"]
    assert [part.spec for part in programs] == [replace(whole_spec(a), tokens=size) for size in (128, 520)]


def test_an_encoder_that_names_too_large_parts_is_refused_or_warned_of() -> None:
    a, whole = privacy_filter(), {"topology": [[0, 8]]}
    chosen = topology.resolve_topology(encoder(**whole), a)
    sizes = {p.name: weight_files.file_bytes(p.named_shapes, recipe("int8")) for p in plan.empty_parts(chosen, a)[:-1]}
    (line,) = weight_files.warnings(chosen, sizes)
    assert line.startswith("encoder_128, encoder_520: expected on the CPU on macOS 27, iOS 18 and iOS 27")
    assert "smaller parts run on the Neural Engine everywhere" in line
    with pytest.raises(ConfigError) as caught:
        topology.resolve_topology(encoder(**whole, program={"runs_on": ["macOS 15", "macOS 27"]}), a)
    assert str(caught.value) == (
        "topology: encoder_128 holds 1278192960 bytes of weights, the limit is 1073741824 on macOS 27 (rule W1); "
        "[[0, 4], [4, 8]] fits, or `program.runs_on: [macOS 15, macOS 26]` names only systems that take it"
    )
    with pytest.raises(ConfigError, match=r"^topology: ends at layer 7, the model has 8$"):
        topology.resolve_topology(encoder(topology=[[0, 7]]), a)


def test_a_single_layer_of_an_encoder_may_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1 << 27)
    with pytest.raises(ConfigError, match=r"^topology: layer \d alone holds \d+ bytes .*; INT8 halves them$"):
        topology.resolve_topology(encoder(convert={"precision": "fp16"}), privacy_filter())


def pictured() -> Architecture:
    """Phi-4-mini with a tower of 27 layers at the widths of SigLIP-so400m."""
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "gated": False, "norm": "layer"}
    graph = Graph(1152, 16, 16, 72, 72, 4304, 1e-6, **biases)
    connector = (Step("linear_fc1", 4608, activation="gelu"), Step("linear_fc2", PHI.graph.hidden))
    io = TowerIO(1536, places=2304, merged=4, connector=connector)
    return replace(PHI, tower=TowerArchitecture(graph, 27, io, turned=True, host={"merge": 2}))


def test_a_tower_obeys_the_limits_as_any_part_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """903 MB in fp16 and half of that in INT8; the decoder's parts are as they were."""
    a, images = pictured(), {"patches": [256, 1024]}
    assert a.tower is not None
    plain, both = (topology.resolve_topology(settings(**more), a) for more in ({}, {"images": images}))
    assert both.parts == (*plain.parts, "tower_256", "tower_1024") and both.ranges == plain.ranges
    shapes = constants(tower_spec(a.tower, 256))
    assert [round(weight_files.file_bytes(shapes, recipe(form)) / 1e6) for form in ("fp16", "int8")] == [903, 455]
    limited(monkeypatch, 500_000_000)
    assert topology.resolve_topology(settings(images=images), a)
    said = refusal(a, images={**images, "form": "fp16"})
    assert said.startswith("images: the tower holds 9") and "`form: int8` halves it" in said


@pytest.mark.parametrize(
    ("host", "patches", "said"),
    [
        ({"merge": 2}, [250], "images.patches: 250 is no multiple of the 2 x 2 patches of a row; 248 is"),
        ({"merge": 2}, [6, 1024], "images.patches: 6 is no multiple of the 2 x 2 patches of a row; 4 is"),
        (
            {"merge": 2, "grid": [32, 32]},
            [256, 1024],
            "images.patches: [256, 1024], but the tower's images have 1024 patches; write [1024]",
        ),
    ],
)
def test_buckets_that_the_tower_can_t_have_are_refused(host: dict[str, Any], patches: list[int], said: str) -> None:
    a = pictured()
    assert a.tower is not None
    assert refusal(replace(a, tower=replace(a.tower, host=host)), images={"patches": patches}) == said


def test_a_form_of_its_own_is_the_tower_s_alone() -> None:
    """A recipe of few bits, or of fp16, leaves the tower to `images.form`; a named matrix has its own."""
    chosen = settings(images={"form": "fp16"}).recipe
    assert {chosen.form("layers.0.mlp.up_proj.weight"), chosen.form("tower.layers.0.mlp.up_proj.weight")} == {
        "int8",
        "fp16",
    }
    named = replace(chosen, matrices={"tower.patch.weight": "int8"})
    assert (named.form("tower.patch.weight"), named.form("tower.linear_fc1.weight")) == ("int8", "fp16")
    assert settings().recipe == settings().convert.recipe
