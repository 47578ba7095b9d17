"""What jobs declare as memory covers what they took, and a job that does not fit is refused, not started."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from portable_coreml.run import stored

import shardmill.plan
from shardmill import machine
from shardmill.errors import ShardmillError
from shardmill.models.recurrences import RECURRENCES
from shardmill.pipeline import job, resources
from shardmill.pipeline.needs import STEPS
from shardmill.pipeline.resources import Need, Sizes

BARE = "from shardmill.pipeline.resources import own_peak; print(own_peak())"
NORM, QKV, OUT, GATE_UP, DOWN = 3072, 5120 * 3072, 3072 * 3072, 16384 * 3072, 3072 * 8192
LAYER, SLICE, TABLE = 2 * NORM + QKV + OUT + GATE_UP + DOWN, 50016 * 3072, 200064 * 3072


def phi_4_mini() -> dict[str, Any]:
    """plan.json of Phi-4-mini, as far as memory depends on it."""
    layers = {"layers_00_20": 20, "layers_20_24": 4, "layers_24_30": 6, "layers_30_32": 2}
    rows = [row(name, "layers", count * LAYER, GATE_UP, 2 * count * NORM) for name, count in layers.items()]
    rows += [row(f"head_{j}", "head", SLICE + NORM, SLICE, NORM) for j in range(4)]
    return plan(32, 200064, *rows, row("embedding", "embedding", TABLE, TABLE, 0))


def gemma_3_270m() -> dict[str, Any]:
    """The same of Gemma 3 270M, whose vocabulary is larger than its layers."""
    heads = [row(f"head_{j}", "head", 20972160, 20971520, 640) for j in range(8)]
    layers = row("layers_00_18", "layers", 100325376, 1310720, 100325376)
    return plan(18, 262144, layers, *heads, row("embedding", "embedding", 167772160, 167772160, 0))


def qwen_2_5_coder() -> dict[str, Any]:
    """The same of Qwen2.5-Coder 0.5B."""
    heads = [row(f"head_{j}", "head", 34034560, 34033664, 896) for j in range(4)]
    layers = row("layers_00_24", "layers", 357897216, 4358144, 44110848)
    return plan(24, 151936, layers, *heads, row("embedding", "embedding", 136134656, 136134656, 0))


def qwen3(cached: int) -> dict[str, Any]:
    """The same of eight layers with the shapes of Qwen3 0.6B and a tied table."""
    heads = [row(f"head_{j}", "head", 38896640, 38895616, 1024) for j in range(4)]
    layers = row("layers_00_08", "layers", 125847552, 3145728, 125847552) | {"cached": cached}
    return plan(8, 151936, layers, *heads, row("embedding", "embedding", 155582464, 155582464, 0))


def plan(layers: int, vocab: int, *parts: dict[str, Any]) -> dict[str, Any]:
    architecture = {"layers": layers, "vocab": vocab, "graph": {"experts": None}}
    return {"architecture": architecture, "item_bytes": 2, "parts": list(parts)}


def row(name: str, kind: str, parameters: int, largest: int, expanded: int) -> dict[str, Any]:
    return {"name": name, "kind": kind, "parameters": parameters, "largest_tensor": largest, "expanded": expanded}


def demo() -> dict[str, Any]:
    """The same of the demo."""
    rows = [row(f"layers_{a:02}_{b}", "layers", (b - a) * 98496, 49152, (b - a) * 98496) for a, b in DEMO]
    rows = [one | {"cached": one["parameters"] * 2 // 3} for one in rows]
    heads = [row(f"head_{j}", "head", 24672, 24576, 24672) for j in range(4)]
    return plan(32, 1024, *rows, *heads, row("embedding", "embedding", 98304, 98304, 0))


def minilm() -> dict[str, Any]:
    """The same of MiniLM, an encoder of six layers in two buckets."""
    rows = [row(f"encoder_{n}", "encoder", 10647552, 589824, 10647552) for n in (128, 256)]
    table = row("embedding", "embedding", 11917824, 11917824, 0)
    return plan(6, 30522, *rows, table) | {"buckets": [128, 256], "item_bytes": 4}


DEMO = ((0, 20), (20, 24), (24, 30), (30, 32))
PLANS = {"phi": phi_4_mini(), "gemma": gemma_3_270m(), "qwen": qwen_2_5_coder(), "demo": demo(), "minilm": minilm()}
CACHES = 8 * 2 * 8 * 2048 * 128  # numbers of layers, keys and values, heads, slots, and a head's dimensions
PLANS |= {"qwen3": qwen3(CACHES), "qwen3 in three contexts": qwen3(CACHES * 7 // 4)}  # 9 functions, 512 and 1024 slots
PLANS["rotated qwen"] = PLANS["qwen"] | {"item_bytes": 4}
TORCH = 220  # MB of a process that had imported torch 2.13.0+cpu
# MB that processes had resident at most, with 4 threads where they use any; `plain` measured part by part.
MEASURED = {
    ("phi", "split", None): 407,
    ("gemma", "fetch", None): 593,
    ("gemma", "split", None): 913,
    ("phi", "embedding", None): 269,
    ("phi", "convert", "layers_00_20"): 613,
    ("phi", "convert", "head_0"): 458,
    ("phi", "residency", "layers_00_20"): 417,
    ("phi", "reference", None): 1860,
    ("phi", "parity", "layers_00_20"): 4279,
    ("phi", "parity", "layers_30_32"): 884,
    ("phi", "parity", "head_0"): 947,
    ("phi", "benchmark", None): 5765,
    ("gemma", "reference", None): 1362,
    ("gemma", "parity", "layers_00_18"): 1282,
    ("gemma", "parity", "head_0"): 570,
    ("gemma", "parity_stack", None): 2280,
    ("gemma", "benchmark", None): 2113,
    ("qwen", "reference", None): 1183,
    ("qwen", "parity", "layers_00_24"): 1450,
    ("qwen", "parity_stack", None): 2424,
    ("qwen", "benchmark", None): 1685,
    ("qwen3", "parity", "layers_00_08"): 1940,
    ("qwen3", "parity_stack", None): 1928,
    ("qwen3 in three contexts", "parity", "layers_00_08"): 2130,
    ("qwen3 in three contexts", "parity_stack", None): 2077,
    ("phi", "codes", "layers_20_24"): 2456,  # of three layers; it had no more for the third than for the second
    ("rotated qwen", "codes", "layers_00_24"): 1601,
    ("rotated qwen", "sensitivity", "layers_00_24"): 2084,
    ("gemma", "sensitivity", "layers_00_18"): 1784,
    ("gemma", "sensitivity", "head_3"): 1255,
}
# The same of small models, with a torch of 233 MB: their bases are most of what jobs declare. Of forks and of processes
# of their own, whichever took more.
SMALL = {
    ("demo", "fetch", None): 62,
    ("demo", "split", None): 291,
    ("demo", "reference", None): 389,
    ("demo", "embedding", None): 244,
    ("demo", "convert", "layers_00_20"): 354,
    ("demo", "expected", None): 410,
    ("demo", "residency", "layers_00_20"): 371,
    ("demo", "parity", "layers_00_20"): 458,
    ("demo", "parity_stack", None): 484,
    ("demo", "benchmark", None): 489,
    ("minilm", "split", None): 291,
    ("minilm", "reference", None): 412,
    ("minilm", "convert", "encoder_256"): 494,
    ("minilm", "expected", None): 574,
    ("minilm", "residency", "encoder_256"): 315,
    ("minilm", "parity", "encoder_256"): 525,
    ("minilm", "parity_stack", None): 667,
    ("minilm", "benchmark", None): 495,
}


def need(step: str) -> Need:
    """What the table says of a step, with the torch of `MEASURED`."""
    return STEPS[step].needs.with_torch(TORCH)


@pytest.mark.parametrize(("model", "step", "part"), MEASURED)
def test_needs_cover_what_was_measured(model: str, step: str, part: str | None) -> None:
    """And not much more, or jobs would wait for memory that nobody uses."""
    measured, mb = MEASURED[model, step, part], need(step).mb(resources.job_sizes(PLANS[model], 256, part))
    assert measured <= mb < 1.6 * measured + 300


@pytest.mark.parametrize("model", ["demo", "minilm"])
def test_a_small_build_declares_at_most_half_as_much_again(model: str) -> None:
    """Of its largest job, and never less than a job took, by a tenth for what differs from run to run."""
    took = {key: mb for key, mb in SMALL.items() if key[0] == model}
    says = {
        (_, step, part): STEPS[step].needs.with_torch(233).mb(resources.job_sizes(PLANS[model], 256, part))
        for _, step, part in took
    }
    assert all(1.1 * mb <= says[key] for key, mb in took.items())
    assert max(says.values()) <= 1.5 * max(took.values())


@pytest.mark.parametrize(("portable", "mb"), [(True, 10393), (False, 8857)])
def test_core_ml_makes_no_copies_of_weights(monkeypatch: pytest.MonkeyPatch, portable: bool, mb: int) -> None:
    """So that Phi-4-mini fits the six tenths of a Mac of 16 GB, which are 10.3 GB."""
    monkeypatch.setattr(resources, "is_portable", lambda: portable)
    monkeypatch.setattr(resources, "torch_mb", lambda: TORCH)
    declared = resources.on_this_machine(STEPS["parity_stack"].needs).mb(resources.job_sizes(PLANS["phi"], 256))
    assert declared == pytest.approx(mb, abs=1)
    assert resources.on_this_machine(STEPS["provenance"].needs) == STEPS["provenance"].needs


def test_what_makes_the_plan_declares_a_large_vocabulary_without_one(build: Path) -> None:
    """Others wait for the plan."""
    (build / "plan.json").unlink()
    says = {}
    for step in ("split", "benchmark"):
        says[step] = resources.declared(known(build), step, need(step), None)
    asked = SimpleNamespace(get={}.get), ["build/m/source.json"]
    assert says["split"](*asked) == need("split").mb(Sizes(vocab=resources.LARGEST_VOCAB))  # type: ignore[operator]
    with pytest.raises(FileNotFoundError):
        says["benchmark"](*asked)  # type: ignore[operator]


def test_what_is_expanded_is_what_the_engine_expands() -> None:
    assert shardmill.plan.LARGE == stored.LARGE


def test_sizes_are_those_of_the_part_and_of_the_model() -> None:
    part = resources.job_sizes(phi_4_mini(), 100, "layers_30_32")
    assert (part.part, part.largest, part.layer) == (2 * LAYER / 1e6, GATE_UP / 1e6, LAYER / 1e6)
    assert (part.expanded, part.logits) == (4 * NORM / 1e6, 20.0064)
    whole = resources.job_sizes(phi_4_mini(), 100)
    assert whole.expanded == pytest.approx((64 + 4) * NORM / 1e6)
    assert (whole.part, whole.largest, whole.table) == (0, SLICE / 1e6, TABLE / 1e6)
    assert whole.model == pytest.approx((32 * LAYER + 4 * (SLICE + NORM)) / 1e6)


def test_the_stack_s_gate_declares_the_reference_of_a_drafter() -> None:
    """In fp32, beside its mapped file; the other gates of a drafter's parts have their own part only."""
    drafting, head = phi_4_mini(), row("draft_head", "head", SLICE + NORM, SLICE, NORM)
    drafting["parts"].insert(-1, head | {"drafter": True})
    other = phi_4_mini()
    other["parts"].insert(-1, head)
    with_drafter, without = (resources.job_sizes(plan, 100) for plan in (drafting, other))
    assert with_drafter.drafter == (SLICE + NORM) / 1e6 and not without.drafter
    more = need("parity_stack").mb(with_drafter) - need("parity_stack").mb(without)
    assert more == pytest.approx(6 * (SLICE + NORM) / 1e6, abs=1)


def test_only_what_transformers_is_given_whole_counts_as_a_whole_layer() -> None:
    """Linear layers come by rows; stacks of experts, and the layers of an encoder, do not."""
    dense = resources.job_sizes(phi_4_mini(), 100)
    mixed = phi_4_mini()
    mixed["architecture"] |= {"graph": {"experts": {"count": 8}}}
    encoder = phi_4_mini() | {"buckets": [64]}
    encoder["parts"] = [row("encoder_64", "encoder", 32 * LAYER, GATE_UP, NORM), encoder["parts"][-1]]
    assert (dense.whole, resources.job_sizes(mixed, 100).whole, resources.job_sizes(encoder, 100).whole) == (
        0,
        LAYER / 1e6,
        LAYER / 1e6,
    )
    assert need("parity").mb(resources.job_sizes(mixed, 100)) - need("parity").mb(dense) >= 3.5 * LAYER / 1e6 - 1
    assert Need(1, whole=1).mb(Sizes(wide=7)) == 8
    assert dense.logits and not resources.job_sizes(encoder, 100).logits  # an encoder has rows in their place


@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_recurrence_has_the_logits_of_a_longer_text_too(kind: str) -> None:
    """At 256 of 2,048 positions."""
    recurrent = phi_4_mini()
    recurrent["architecture"] |= {"graph": {"experts": None, kind: {"taps": 4}}}
    plain = resources.job_sizes(phi_4_mini(), 100).logits
    assert resources.job_sizes(recurrent, 100).logits == pytest.approx(3.56 * plain)


def test_what_importing_torch_takes_is_added_for_each_process_that_does() -> None:
    assert Need(100, torch=2, part=3).with_torch(250) == Need(600, part=3)
    known = {"torch", "transformers", "coremltools"}  # the last two import the first; a compiler is spared it
    assert {name for name, step in STEPS.items() if step.needs.torch} == {
        name for name, step in STEPS.items() if known & {*step.packages}
    } - {"compile"}


def test_the_import_of_torch_is_measured_once_for_each_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, measure = list[str](), resources.subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        started.append(machine.torch_build())
        return measure(command, **options)

    def ask(build: str) -> int:
        """As a new process does."""
        monkeypatch.setattr(resources, "torch_build", lambda: build)
        resources.torch_mb.cache_clear()
        return resources.torch_mb()

    monkeypatch.setattr(resources, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(resources.subprocess, "run", run)
    taken = ask("9.1+cpu")
    assert taken > resources.ceil(int(measure([sys.executable, "-c", BARE], capture_output=True).stdout) / 1e6)
    assert (ask("9.1+cpu"), len(started)) == (taken, 1)
    monkeypatch.setattr(resources, "IMPORT", "print(520_000_001)")
    assert (ask("9.1+cu130"), ask("9.1+cpu"), len(started)) == (521, taken, 2)
    (tmp_path / "kept.json").write_text('{"9.1+cpu": "much"')
    monkeypatch.setattr(resources, "IMPORT", "import nothing_of_this_name")
    assert (ask("9.1+cpu"), len(started)) == (0, 3)
    resources.torch_mb.cache_clear()


def test_a_need_counts_every_size() -> None:
    found = Sizes(part=1, largest=10, layer=100, model=1000, table=10000, whole=100000)
    assert Need(100, part=1, largest=2, layer=3, model=4, table=5, whole=6).mb(found) == 654421
    assert Need(100, part=0.5).mb(Sizes(part=1)) == 101  # whole MB, and never too few
    assert [Need(100, **reads).mb(Sizes(wide=7)) for reads in ({"part": 1}, {"layer": 1}, {"table": 1})] == [
        100,
        107,
        107,
    ]


@pytest.fixture
def build(tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text(json.dumps(phi_4_mini()))
    return tmp_path


def nothing() -> dict[str, Any]:
    """What config.json lets expect where it was never looked at."""
    raise FileNotFoundError


def known(build: Path) -> resources.Known:
    return resources.known_sizes(build, 256, nothing)


def convert(build: Path, limit: int | None = None) -> Callable[[str], int]:
    """What a convert job declares, by part."""
    mem_mb = resources.declared(known(build), "convert", need("convert"), limit)
    assert callable(mem_mb)
    return lambda part: mem_mb(SimpleNamespace(get={"part": part}.get), ["build/m/parts/p.json"])


def test_jobs_declare_what_the_plan_says_of_their_part(build: Path) -> None:
    assert 650 < convert(build)("layers_24_30") < convert(build)("layers_00_20") < 850


def test_the_conversion_of_an_encoder_is_declared_by_its_bucket(tmp_path: Path) -> None:
    """The privacy filter at full size: 799 and 1,120 MB were seen, for buckets of 128 and 512 tokens."""
    row = {"kind": "encoder", "parameters": 1272110880, "largest_tensor": 6553600, "expanded": 13819680}
    rows = [row | {"name": "encoder_128"}, row | {"name": "encoder_512"}]
    table = {"name": "embedding", "kind": "embedding", "parameters": 128040960, "largest_tensor": 0, "expanded": 0}
    known = plan(8, 200064, *rows, table) | {"buckets": [128, 512]}
    (tmp_path / "plan.json").write_text(json.dumps(known))
    declared = convert(tmp_path)
    assert 799 < declared("encoder_128") < 1120 < declared("encoder_512") < 1400


def test_a_job_that_does_not_fit_is_refused_with_the_remedy(build: Path) -> None:
    mb = convert(build)("head_0")
    assert convert(build, limit=mb)("head_0") == mb
    words = f"convert head_0: needs {mb} MB of memory and this build may use {mb - 1}; .*--resources mem_mb={mb}$"
    with pytest.raises(ShardmillError, match=words):
        convert(build, limit=mb - 1)("head_0")


def test_what_a_second_thread_took_is_declared() -> None:
    """Costs of rotated Qwen's first layer: 2,800 MB with two threads, and the layers after it took no more."""
    found, each = resources.job_sizes(PLANS["rotated qwen"], 256, "layers_00_24"), STEPS["sensitivity"].each_thread
    assert 2800 <= need("sensitivity").mb(found) + each.mb(found) < 1.1 * 2800


def test_threads_are_declared_and_a_job_that_gets_less_starts_fewer(build: Path) -> None:
    first, each, part = need("sensitivity"), STEPS["sensitivity"].each_thread, "layers_20_24"
    found = resources.job_sizes(phi_4_mini(), 256, part)
    asked = {
        limit: resources.declared(known(build), "sensitivity", first, limit, each=each)(  # type: ignore[operator]
            SimpleNamespace(get={"part": part}.get), ["build/m/plan.json"], 4
        )
        for limit in (None, first.mb(found) + each.mb(found) + 5, first.mb(found))
    }
    assert [*asked.values()] == [first.mb(found) + 3 * each.mb(found), *list(asked)[1:]]  # type: ignore[list-item]
    assert [resources.threads_within(mb, 4, first, each, found) for mb in asked.values()] == [4, 2, 1]
    assert resources.threads_within(10**6, 4, first, each, found) == 4


@pytest.mark.parametrize(("missing", "threads"), [(0, 2), (1, 1)])
def test_a_job_starts_threads_beside_the_torch_that_was_declared(
    missing: int, threads: int, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "torch_mb", lambda: TORCH)
    row, part = STEPS["sensitivity"], "layers_20_24"
    found = resources.job_sizes(phi_4_mini(), 256, part)
    given = {"mem_mb": need("sensitivity").mb(found) + row.each_thread.mb(found) - missing}
    started = SimpleNamespace(threads=4, wildcards={"part": part}, resources=given)
    assert job._threads(row, started, {"summary": build / "plan.json"}) == threads


@pytest.mark.parametrize("content", [None, "", "{", '{"parts": [{"name": "head_0"}]}', '{"parts": []}'])
def test_before_there_is_a_plan_snakemake_is_told_so(content: str | None, build: Path) -> None:
    """It takes a FileNotFoundError that names one of the job's inputs for <TBD>. An older version's plan is none."""
    (build / "plan.json").unlink()
    if content is not None:
        (build / "plan.json").write_text(content)
    with pytest.raises(FileNotFoundError) as raised:
        convert(build)("head_0")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, "build/m/parts/p.json")


def test_before_there_is_a_plan_memory_follows_from_what_is_expected(build: Path) -> None:
    """And from the plan once it is there."""
    expected = phi_4_mini() | {"item_bytes": 4}
    mem_mb = resources.declared(
        resources.known_sizes(build, 256, lambda: expected), "reference", need("reference"), None
    )
    assert callable(mem_mb)
    asked = SimpleNamespace(get={}.get), ["build/m/plan.json"]
    planned = mem_mb(*asked)
    (build / "plan.json").write_text("{}")
    assert mem_mb(*asked) > planned
