"""Experts for the tokens that take them only: the numbers are the formula's, and nothing more is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import limits
import numpy as np
import pytest
import torch
from portable_coreml.files.read_text import read_text
from portable_coreml.program import Blob, Value
from portable_coreml.run import experts, products, stored
from portable_coreml.run.execute import Executable
from portable_coreml.run.observe import trace
from portable_coreml.run.stored import StoredMatrix
from torch import Tensor

D, FFN, OUT = 6, 5, 4
SHARED = 3  # experts of a group
INF = float("inf")
HEAD = """program(1.3){{ func main<ios18>(tensor<fp32, [1, {d}, ?, 1]> x, tensor<fp32, [1, {count}, ?, 1]> w) {{
"""
CONV = (
    "conv(x = {x}, weight = {weight}, bias = {bias}, strides = tensor<int32, [2]>([1, 1]), pad_type = string("
    '"valid"), pad = tensor<int32, [4]>([0, 0, 0, 0]), dilations = tensor<int32, [2]>([1, 1]), groups = int32(1))'
)
Constants = dict[int, np.ndarray]


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of any size count."""
    monkeypatch.setattr(experts, "LEAST", 1)


def constants(count: int) -> Constants:
    """Weights and biases by the offset that the program gives them."""
    rng = np.random.default_rng(0)
    shapes = [(count * FFN, D), (count * FFN,), (count * FFN, D), (count * FFN,), (OUT, count * FFN), (OUT,)]
    found = {i: rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    return found | {6: rng.standard_normal((count * FFN, 1)).astype(np.float32)}


def image(rows: int, name: str) -> str:
    return f"tensor<fp32, [1, {rows}, ?, 1]> {name}"


def text(count: int, *, chain: str = "", outputs: str = "y") -> str:
    """down((silu(gate) * up) * weight), of one expert or of a group; `chain` replaces the product of the two."""
    rows = count * FFN

    def blob(kind: str, offset: int) -> str:
        return f'tensor<fp32, {kind}>(BLOBFILE(path = string("w"), offset = uint64({offset})))'

    def product(name: str, out: int, wide: int, x: str, at: int) -> str:
        kind = f"tensor<fp32, [{out}, {wide}, 1, 1]>"
        value = f"{kind} m_{name} = const()[val = {blob(f'[{out}, {wide}, 1, 1]', at)}];\n"
        call = CONV.format(x=x, weight=f"m_{name}", bias=blob(f"[{out}]", at + 1))
        return f"{value}{image(out, name)} = {call};\n"

    lines = product("gate", rows, D, "x", 0) + product("up", rows, D, "x", 2)
    lines += f"{image(rows, 'a')} = silu(x = gate);\n"
    lines += chain or f"{image(rows, 'h')} = mul(x = a, y = up);\n"
    if count == 1:
        lines += f"{image(1, 'v')} = identity(x = w);\n{image(rows, 'z')} = mul(x = h, y = v);\n"
    else:
        apart, share = f"tensor<fp32, [1, {count}, {FFN}, ?]>", f"tensor<fp32, [1, {count}, 1, ?]>"
        lines += f"{apart} p = reshape(x = h, shape = tensor<int32, [4]>([1, {count}, {FFN}, -1]));\n"
        lines += f"{share} s = reshape(x = w, shape = tensor<int32, [4]>([1, {count}, 1, -1]));\n"
        lines += f"{apart} q = mul(x = p, y = s);\n"
        lines += f"{image(rows, 'r')} = reshape(x = q, shape = tensor<int32, [4]>([1, {rows}, -1, 1]));\n"
        lines += f"{image(rows, 'z')} = mul(x = r, y = {blob(f'[1, {rows}, 1, 1]', 6)});\n"
    return HEAD.format(d=D, count=count) + lines + product("y", OUT, rows, "z", 4) + f"}} -> ({outputs}); }}"


def loaded(program: str, known: Constants, precision: str = "fp32") -> Executable:
    def load(value: Value) -> np.ndarray:
        if isinstance(value.data, np.ndarray):
            return value.data
        assert isinstance(value.data, Blob)
        return known[value.data.offset].reshape([size or 0 for size in value.type.shape])  # type: ignore[union-attr]

    return Executable(read_text(program).functions["main"], load, precision)


def formula(known: Constants, x: Tensor, weight: Tensor) -> Tensor:
    """Of one image [1, D, T, 1] and weights [1, count, T, 1], every expert for every token."""
    k = {i: torch.from_numpy(value) for i, value in known.items()}
    columns, shares = x[0, :, :, 0], weight[0, :, :, 0].repeat_interleave(FFN, 0)
    gate, up = k[0] @ columns + k[1][:, None], k[2] @ columns + k[3][:, None]
    hidden = torch.nn.functional.silu(gate) * up * shares * (k[6] if weight.shape[1] > 1 else 1)
    return (k[4] @ hidden + k[5][:, None])[None, :, :, None]


def summed(count: int) -> limits.Limit:
    """The limit of so many experts: gate or up, SiLU, their product and share, and the sum over all experts."""
    return limits.sums("fp32", max(D, count * FFN), 4)


def drawn(count: int, tokens: int, taken: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, D, tokens, 1, generator=generator)
    weight = torch.rand(1, count, tokens, 1, generator=generator)
    return {"x": x, "w": weight * (torch.rand(1, count, tokens, 1, generator=generator) < taken)}


def found(executable: Executable) -> int:
    """How many groups run for some tokens only."""
    return sum(step.kernel is not None and step.kernel.kind == experts.KIND for step in executable.quick.steps)


@pytest.mark.parametrize("count", [1, SHARED])
@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize("taken", [0.0, 0.3, 1.0])
def test_every_run_gives_what_the_formula_gives(count: int, tokens: int, taken: float) -> None:
    known, inputs = constants(count), drawn(count, tokens, taken)
    executable = loaded(text(count), known)
    assert found(executable) == 1
    for _ in range(2):  # interpreted, and planned
        (y,) = executable.run(inputs, {})
        limits.numbers_agree("experts", y, formula(known, inputs["x"], inputs["w"]), summed(count))


@pytest.mark.parametrize("count", [1, SHARED])
def test_stored_matrices_are_cut_apart_like_others(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LARGE", 1)
    known, inputs = constants(count), drawn(count, 9)
    half = {i: value.astype(np.float16) for i, value in known.items()}
    program = text(count)
    for i, shape in (
        (0, f"[{count * FFN}, {D}, 1, 1]"),
        (2, f"[{count * FFN}, {D}, 1, 1]"),
        (4, f"[{OUT}, {count * FFN}, 1, 1]"),
    ):
        program = program.replace(f"tensor<fp32, {shape}>", f"tensor<fp16, {shape}>")
        known[i] = half[i]
    executable = loaded(program, known)
    assert found(executable) == 1
    (y,) = executable.run(inputs, {})
    wide = {i: value.astype(np.float32) for i, value in known.items()}
    limits.numbers_agree("experts", y, formula(wide, inputs["x"], inputs["w"]), summed(count))


def test_fp16_experts_are_skipped_for_inputs_of_any_ordinary_size() -> None:
    """Their bound is what their numbers add up to, as that of a palette's are; one that is NaN bounds nothing."""
    values = torch.randn(9, 4096, generator=torch.Generator().manual_seed(1)).half()
    bound = experts.reach(StoredMatrix(values, None, False))
    limits.agrees("the bound", abs(bound / float(values.double().abs().sum(1).max()) - 1), limits.sums("fp32", 4096))
    assert 1000 * bound < experts.LARGEST
    values[3, 7] = float("nan")
    assert not experts.reach(StoredMatrix(values, None, False)) < INF


@pytest.mark.parametrize("is_fast", [True, False], ids=["fixed point", "in blocks"])
@pytest.mark.parametrize("tokens", [1, 9, 80])
def test_int8_matrices_are_multiplied_as_they_are_stored(
    tokens: int, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against their expansion in float64."""
    monkeypatch.setattr(products, "takes_so_many", lambda count: is_fast)
    generator, known = torch.Generator().manual_seed(tokens), constants(SHARED)
    executable = loaded(text(SHARED), known)
    group = next(step.kernel.call for step in executable.quick.steps if step.kernel and step.kernel.kind == "experts")
    assert isinstance(group, experts.Group)

    def int8(matrices: Sequence[experts.Matrix], scale: Tensor | None = None) -> tuple[experts.Matrix, ...]:
        made = []
        for matrix in matrices:
            assert isinstance(matrix, Tensor)
            values = torch.randint(-127, 128, matrix.shape, generator=generator, dtype=torch.int8)
            own = scale if scale is not None else torch.rand(len(matrix), 1, generator=generator) / 64
            made.append(StoredMatrix(values, own, False))
        return tuple(made)

    def expanded(matrices: Sequence[experts.Matrix], dim: int) -> np.ndarray:
        dense = [m.values.double() * m.scale for m in matrices if isinstance(m, StoredMatrix) and m.scale is not None]
        return torch.cat(dense, dim).numpy()

    first = tuple(replace(one, matrices=int8(one.matrices)) for one in group.first)
    down = int8(group.down, torch.rand(OUT, 1, generator=generator) / 64)
    assert all(products.takes_fixed_point(matrix, tokens) for matrix in down) is is_fast
    inputs = drawn(SHARED, tokens)
    found = replace(group, first=first, down=down)(inputs["x"], inputs["w"])
    named = {one.name: expanded(one.matrices, 0) for one in first}
    wide = {i: value.astype(np.float64) for i, value in known.items()}
    wide |= {0: named["gate"], 2: named["up"], 4: expanded(down, 1)}
    expected = formula(wide, inputs["x"].double(), inputs["w"].double()).float()
    limits.numbers_agree("experts", found, expected, summed(SHARED))


def test_only_tokens_that_take_an_expert_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, plain = [], experts.product
    monkeypatch.setattr(experts, "product", lambda m, x, **o: widths.append(x.shape[1]) or plain(m, x, **o))
    inputs, executable = drawn(SHARED, 9), loaded(text(SHARED), constants(SHARED))
    executable.run(inputs, {})
    widths.clear()
    executable.run(inputs, {})  # the first run plans, and calls everything twice
    assert sum(widths) == 3 * int((inputs["w"] != 0).sum()) > 0  # gate, up and down


@pytest.mark.parametrize("count", [1, SHARED])
@pytest.mark.parametrize("broken", ["x", "weight", "large"])
def test_what_a_device_would_spoil_is_spoilt(count: int, broken: str) -> None:
    """0 * inf is NaN: an expert that nobody takes reaches every token whose numbers are infinite in it."""
    known, inputs = constants(count), drawn(count, 4, 0.0)
    if broken == "x":
        inputs["x"][0, 2, 1, 0] = INF
    elif broken == "weight":
        inputs["w"][0, 0, 1, 0] = float("nan")
    else:
        inputs["x"][0, :, 1, 0] = 3e37
        known[0][:], known[2][:] = 50.0, 50.0
    (y,) = loaded(text(count), known).run(inputs, {})
    assert torch.equal(y.isnan(), formula(known, inputs["x"], inputs["w"]).isnan())
    assert bool(y.isnan().any())


def test_an_observer_sees_every_value() -> None:
    executable = loaded(text(SHARED), constants(SHARED))
    names: list[str] = []
    with trace(lambda name, kind, value: names.append(name)):
        executable.run(drawn(SHARED, 4), {})
    assert {"gate", "up", "h", "z", "y"} <= set(names)


ELSEWHERE = f"{image(FFN, 'b')} = mul(x = a, y = up);\n{image(FFN, 'h')} = "
OTHERS = {
    "a hidden value is an output": text(1, outputs="y, h"),
    "the weighed value is an output": text(1, outputs="y, z"),
    "two products of which one is an output": text(1, outputs="y, gate"),
    "an operation over channels": text(1, chain=f"{ELSEWHERE}softmax(x = b, axis = int32(1));\n"),
    "a constant of each channel": text(
        1, chain=f"{ELSEWHERE}mul(x = b, y = tensor<fp32, [1, {FFN}, 1, 1]>([[[[1]], [[2]], [[3]], [[4]], [[5]]]]));\n"
    ),
    "a weight for each channel": text(1)
    .replace("mul(x = h, y = v)", "mul(x = h, y = c)")
    .replace(
        f"{image(FFN, 'z')}",
        f"{image(FFN, 'c')} = tile(x = v, reps = tensor<int32, [4]>([1, {FFN}, 1, 1]));\n{image(FFN, 'z')}",
    ),
    "products of two inputs": text(1).replace(
        f"{image(FFN, 'up')} = conv(x = x", f"{image(D, 'x2')} = square(x = x);\n{image(FFN, 'up')} = conv(x = x2"
    ),
    "one number in the place of the weights": text(1).replace("mul(x = h, y = v)", "mul(x = h, y = fp32(0.5))"),
    "nothing of x": text(1).replace("mul(x = h, y = v)", "mul(x = w, y = v)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_left_alone(name: str) -> None:
    assert not found(loaded(OTHERS[name], constants(1)))


def test_fp16_computes_every_expert() -> None:
    assert not found(loaded(text(1), constants(1), "fp16"))


def test_small_experts_are_computed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling a small one costs more than it saves."""
    monkeypatch.setattr(experts, "LEAST", D * FFN + 1)
    assert not found(loaded(text(SHARED), constants(SHARED)))
