"""A stateful program with flexible shapes, against the torch module it was traced from; states, threads, control
flow.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import limits
import numpy as np
import portable_coreml
import pytest
import torch

from tests.conftest import CachedAttention, step_inputs

ATTENTION = limits.sums("fp32", 32, 5)  # projection, scores, softmax, weighted sum, projection


def load(path: Path) -> Any:
    import coremltools as ct

    return ct.models.MLModel(str(path))


def torch_steps(module: CachedAttention, steps: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    module.cache_k.zero_(), module.cache_v.zero_()
    with torch.no_grad():
        return [module(*(torch.from_numpy(v) for v in step.values())).numpy() for step in steps]


@pytest.mark.parametrize("widths", [(1,) * 8, (4, 4), (2, 3, 1, 2), (3, 1, 4)])
def test_every_split_of_a_sequence_gives_torchs_outputs_and_states(
    attention: CachedAttention, attention_package: Path, widths: tuple[int, ...]
) -> None:
    """T=1..4 in any order: outputs and both caches are those of the torch module, to float32 rounding."""
    model, first, steps = load(attention_package), 0, []
    for width in widths:
        steps.append(step_inputs(32, 8, first, width, seed=first))
        first += width
    state = model.make_state()
    ours = [model.predict(dict(step), state)["hidden"] for step in steps]
    for mine, theirs in zip(ours, torch_steps(attention, steps), strict=True):
        limits.numbers_agree("hidden", mine, theirs, ATTENTION)
    for name in ("cache_k", "cache_v"):
        limits.numbers_agree(name, state.read_state(name), getattr(attention, name), limits.sums("fp32", 32))


def test_fp16_mode_rounds_every_result(attention_package: Path) -> None:
    """Everything that an observed fp16 program computes is an fp16 number, and some of it differs from fp32 mode."""
    portable_coreml.install("fp16")
    model = load(attention_package)
    seen: list[torch.Tensor] = []
    with portable_coreml.trace(lambda name, kind, value: seen.append(value)):
        model.predict(step_inputs(32, 8, 0, 2, 1), model.make_state())
    values = [v for v in seen if v.is_floating_point()]
    assert len(values) > 10
    assert all(torch.equal(v, v.half().float()) for v in values)
    half = model.predict(step_inputs(32, 8, 0, 2, 1), model.make_state())["hidden"]
    assert half.dtype == np.float16
    portable_coreml.install("fp32")
    full = load(attention_package).predict(step_inputs(32, 8, 0, 2, 1))["hidden"]
    assert 0 < np.abs(half - full).max() < 0.01


def test_a_model_keeps_the_precision_it_was_loaded_with(attention_package: Path) -> None:
    """install() with another precision changes later loads only."""
    full = load(attention_package)
    portable_coreml.install("fp16")
    half = load(attention_package)
    step = step_inputs(32, 8, 0, 1, 3)
    assert full.predict(dict(step))["hidden"].dtype == np.float32
    assert half.predict(dict(step))["hidden"].dtype == np.float16


def test_an_observed_run_gives_the_same_values(attention_package: Path) -> None:
    """trace() must not change what it looks at; the plain run is compiled and writes states in place."""
    model = load(attention_package)
    plain, observed = model.make_state(), model.make_state()
    for first, width in ((0, 1), (1, 3), (4, 1), (5, 3)):
        step = step_inputs(32, 8, first, width, first)
        mine = model.predict(dict(step), plain)["hidden"]
        with portable_coreml.trace(lambda *_: None):
            theirs = model.predict(dict(step), observed)["hidden"]
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(plain.read_state("cache_v"), observed.read_state("cache_v"))


@pytest.mark.parametrize("widths", [(4, 4), (2, 3, 1, 2), (3, 1, 4)])
def test_in_fp16_a_token_does_not_depend_on_how_many_are_fed(attention_package: Path, widths: tuple[int, ...]) -> None:
    """To the last bit, states included: or drafting would change what is said."""
    portable_coreml.install("fp16")
    model = load(attention_package)
    steps = [step_inputs(32, 8, first, 1, seed=first) for first in range(8)]
    state, one_by_one = model.make_state(), []
    for step in steps:
        one_by_one.append(model.predict(dict(step), state)["hidden"])
    wide, first = model.make_state(), 0
    for width in widths:
        step = step_inputs(32, 8, first, width, seed=0)
        step["x"] = np.concatenate([s["x"] for s in steps[first : first + width]], axis=2)
        found = model.predict(step, wide)["hidden"]
        np.testing.assert_array_equal(found, np.concatenate(one_by_one[first : first + width], axis=2))
        first += width
    for name in ("cache_k", "cache_v"):
        np.testing.assert_array_equal(wide.read_state(name), state.read_state(name))


def test_values_die_when_nothing_needs_them_any_more(attention_package: Path) -> None:
    """Of a program with many layers, an interpreted run would otherwise hold every value of every layer."""
    model = load(attention_package)
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def count(name: str, kind: str, value: torch.Tensor) -> None:
        nonlocal most
        seen.append(weakref.ref(value))
        most = max(most, sum(ref() is not None for ref in seen))

    with portable_coreml.trace(count):
        model.predict(step_inputs(32, 8, 0, 2, 0), model.make_state())
    assert len(seen) > 25
    assert most < len(seen) / 2


def test_a_model_is_gone_with_its_last_reference(attention_package: Path) -> None:
    """Its plans hold the constants: a cycle among them would keep gigabytes until the next collection."""
    from portable_coreml.proxy import MLModelProxy

    proxy = MLModelProxy(str(attention_package))
    proxy.predict(step_inputs(32, 8, 0, 2, 0))
    executable = weakref.ref(proxy._executable)
    plan = weakref.ref(next(iter(proxy._executable._plans.values())))
    gc.disable()
    try:
        del proxy
        assert executable() is None and plan() is None
    finally:
        gc.enable()


def test_a_mask_that_is_not_one_hot_takes_the_formula(attention: CachedAttention, attention_package: Path) -> None:
    """The in-place cache write is a shortcut for one-hot masks; any other mask must still mean k * (1 - sum) + mask
    @ new.
    """
    model = load(attention_package)
    rng = np.random.default_rng(5)
    steps = [step_inputs(32, 8, 2 * i, 2, i) for i in range(4)]
    for step in steps[1:]:
        step["write"] = rng.random((1, 1, 8, 2)).astype(np.float16).astype(np.float32)
    steps[2]["write"][:] = 0
    steps[2]["write"][0, 0, 3, :] = 1  # both columns write the same slot
    steps[3]["write"][:] = 0
    steps[3]["write"][0, 0, [1, 2], [0, 1]] = 1
    steps[3]["write"][0, 0, 5, 1] = 0.5  # one slot in full, and half of another
    state = model.make_state()
    ours = [model.predict(dict(step), state)["hidden"] for step in steps]
    for mine, theirs in zip(ours, torch_steps(attention, steps), strict=True):
        limits.numbers_agree("hidden", mine, theirs, ATTENTION)


def test_states_are_apart_and_written_by_value(attention_package: Path) -> None:
    """Two states of a model share nothing; write_state copies; an array from read_state is the caller's own."""
    model = load(attention_package)
    one, two = model.make_state(), model.make_state()
    values = np.ones((1, 1, 8, 32), np.float32)
    one.write_state("cache_k", values)
    values[:] = 7
    assert one.read_state("cache_k").max() == 1 and two.read_state("cache_k").max() == 0
    before = one.read_state("cache_k")
    model.predict(step_inputs(32, 8, 0, 1, 0), one)
    assert before.max() == 1
    with pytest.raises(RuntimeError, match="cache_q"):
        one.read_state("cache_q")
    with pytest.raises(RuntimeError, match=r"\[1, 1, 8, 32\]"):
        one.write_state("cache_k", np.ones((1, 1, 4, 32)))


def test_threads_predict_on_one_model_with_their_own_states(attention_package: Path) -> None:
    """Eight threads at once give what one after the other gives."""
    model = load(attention_package)
    results: dict[int, np.ndarray] = {}

    def converse(seed: int) -> None:
        state = model.make_state()
        for first in range(0, 8, 2):
            results[seed] = model.predict(step_inputs(32, 8, first, 2, seed + first), state)["hidden"]

    threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(results)
    for seed in range(8):
        converse(seed)
        np.testing.assert_array_equal(results[seed], together[seed])


def test_the_first_overflow_is_named(build_program: Callable[..., Any]) -> None:
    """The range audit's observer says which operation overflowed first, and that a later NaN is not it."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    def overflow(x: Any) -> Any:
        large = mb.mul(x=x, y=300.0, name="large")
        return mb.sub(x=large, y=mb.mul(x=large, y=2.0, name="larger"), name="nan")

    portable_coreml.install("fp16")
    model = build_program(overflow, {"x": (1, 4)}, compute_precision=ct.precision.FLOAT16)
    watch = portable_coreml.FirstNonFinite()
    with portable_coreml.trace(watch):
        model.predict({"x": np.full((1, 4), 200.0, np.float32)})
    assert watch.found is not None
    assert (watch.found.kind, watch.found.what) == ("mul", "overflow") and "larger" in watch.found.name


def test_control_flow(build_program: Callable[..., Any]) -> None:
    """cond takes one branch; while_loop runs until its condition fails; both see values from outside."""
    from coremltools.converters.mil import Builder as mb

    def program(x: Any) -> Any:
        total = mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False)
        picked = mb.cond(
            pred=mb.greater(x=total, y=0.0), _true_fn=lambda: mb.mul(x=x, y=2.0), _false_fn=lambda: mb.sub(x=x, y=1.0)
        )
        return mb.while_loop(
            _cond=lambda i, v: mb.less(x=i, y=3.0),
            _body=lambda i, v: (mb.add(x=i, y=1.0), mb.add(x=v, y=x)),
            loop_vars=(0.0, picked),
        )[1]

    model = build_program(program, {"x": (1, 2)})
    for row in ([[1.0, 2.0]], [[-1.0, -2.0]], [[1.0, 2.0]]):
        x = np.array(row, np.float32)
        expected = (x * 2 if x.sum() > 0 else x - 1) + 3 * x
        np.testing.assert_array_equal(list(model.predict({"x": x}).values())[0], expected)  # small integers


def test_shapes_made_at_run_time_follow_the_data(build_program: Callable[..., Any]) -> None:
    """non_zero gives another shape each time; what depends on it must not be remembered from the first run."""
    from coremltools.converters.mil import Builder as mb

    def program(x: Any) -> Any:
        found = mb.non_zero(x=x)
        count = mb.slice_by_index(x=mb.shape(x=found), begin=[0], end=[1])
        return mb.cast(x=mb.tile(x=mb.reduce_sum(x=x, axes=[0], keep_dims=True), reps=count), dtype="fp32")

    model = build_program(program, {"x": (5,)})
    for ones in (1, 4, 2):
        x = np.array([1.0] * ones + [0.0] * (5 - ones), np.float32)
        np.testing.assert_array_equal(list(model.predict({"x": x}).values())[0], np.full(ones, ones, np.float32))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_result_does_not_depend_on_the_number_of_threads(build_program: Callable[..., Any], precision: str) -> None:
    """Nor do sums that torch would share: a long one, and a batch of matrices."""
    from coremltools.converters.mil import Builder as mb

    def program(x: Any, y: Any) -> Any:
        scores = mb.matmul(x=x, y=y, transpose_y=True)
        return mb.add(x=scores, y=mb.reduce_sum(x=y, axes=[0, 1, 2, 3], keep_dims=True))

    portable_coreml.install(precision)
    model = build_program(program, {"x": (1, 3, 64, 96), "y": (1, 3, 1024, 96)})
    generator, before, found = np.random.default_rng(3), torch.get_num_threads(), list[np.ndarray]()
    inputs = {name: generator.normal(size=(1, 3, n, 96)).astype(np.float32) for name, n in (("x", 64), ("y", 1024))}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found += [list(model.predict(dict(inputs)).values())[0] for _ in range(2)]  # interpreted once, then compiled
    torch.set_num_threads(before)
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_outputs_do_not_share_memory_with_inputs(build_program: Callable[..., Any]) -> None:
    """A program that only moves its input returns an array of its own, on the first run and on compiled ones."""
    from coremltools.converters.mil import Builder as mb

    model = build_program(lambda x: mb.reshape(x=x, shape=[4]), {"x": (2, 2)})
    for _ in range(3):
        x = np.zeros((2, 2), np.float32)
        out = list(model.predict({"x": x}).values())[0]
        x[:] = 9
        assert out.max() == 0


def test_an_unknown_operation_is_named(tmp_path: Path) -> None:
    """The error names the operation and its output, at loading time and again at prediction."""
    from portable_coreml.files.read_text import read_text
    from portable_coreml.run.execute import Executable

    text = "program(1.3){ func main<ios18>(tensor<fp32, [1]> x) { tensor<fp32, [1]> y = frobnicate(x = x); } -> (y); }"
    with pytest.raises(portable_coreml.UnsupportedOp, match="'frobnicate'.*'y'"):
        Executable(read_text(text).functions["main"], lambda value: value.data, "fp32")  # type: ignore[arg-type, return-value]
