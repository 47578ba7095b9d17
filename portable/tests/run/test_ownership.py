"""Who owns the memory of a result: what a caller gets, and what a state holds, changes with nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from portable_coreml.files.read_text import read_text
from portable_coreml.program import Value
from portable_coreml.run.execute import Executable

CHOICE = (
    "tensor<fp32, [2]> z = cond(pred = p) () { tensor<fp32, [2]> a = add(x = x, y = x); } -> (a) () { } -> (x); "
    "tensor<fp32, [1, 2]> y = expand_dims(axes = tensor<int32, [1]>([0]), x = z);"
)
WRITE = """
    tensor<fp32, [1, 4, 2]> old = read_state(input = k); tensor<fp32, [1, 4, 2]> again = read_state(input = k);
    tensor<fp32, [1, 4, 1]> s = reduce_sum(axes = tensor<int32, [1]>([-1]), keep_dims = bool(true), x = mask);
    tensor<fp32, [1, 4, 1]> keep = sub(x = fp32(0x1p+0), y = s);
    tensor<fp32, [1, 4, 2]> kept = mul(x = old, y = keep);
    tensor<fp32, [1, 4, 2]> rows = matmul(transpose_x = bool(false), transpose_y = bool(false), x = mask, y = new);
    tensor<fp32, [1, 4, 2]> sum = add(x = kept, y = rows); write_state(data = sum, input = k);
    tensor<fp32, [1, 4, 2]> y = mul(x = again, y = fp32(0x1p+1));
"""


def program(parameters: str, lines: str) -> Executable:
    text = f"program(1.3){{ func main<ios18>({parameters}) {{ {lines} }} -> (y); }}"

    def load(value: Value) -> np.ndarray:
        assert isinstance(value.data, np.ndarray)
        return value.data

    return Executable(read_text(text).functions["main"], load, "fp32")


def choose(made: Executable, x: torch.Tensor, first: bool, states: dict[str, torch.Tensor]) -> torch.Tensor:
    return made.run({"x": x, "p": torch.tensor(first)}, states)[0]


def test_an_output_that_one_branch_takes_from_an_input_is_a_copy() -> None:
    """The first run, from which the plan is made, takes the branch that computes something new."""
    made, x = program("bool p, tensor<fp32, [2]> x", CHOICE), torch.ones(2)
    assert choose(made, x, True, {}).tolist() == [[2.0, 2.0]]
    found = choose(made, x, False, {})
    x.fill_(7)
    assert found.tolist() == [[1.0, 1.0]]


def test_a_state_that_one_branch_takes_from_an_input_is_a_copy() -> None:
    """A caller that uses its array again must not change a state so."""
    write = "write_state(data = y, input = k);"
    made, x = program("state<tensor<fp32, [1, 2]>> k, bool p, tensor<fp32, [2]> x", CHOICE + write), torch.ones(2)
    states = made.new_state()
    choose(made, x, True, states)
    choose(made, x, False, states)
    x.fill_(7)
    assert states["k"].tolist() == [[1.0, 1.0]]


def test_what_was_read_of_a_state_stays_as_it_was() -> None:
    """A state that is read twice is not written in place: the second reading is used after the write."""
    made = program("state<tensor<fp32, [1, 4, 2]>> k, tensor<fp32, [1, 4, 1]> mask, tensor<fp32, [1, 1, 2]> new", WRITE)
    states, mask = made.new_state(), torch.tensor([[[0.0], [1.0], [0.0], [0.0]]])
    for number in range(1, 4):
        before = states["k"] * 2
        (found,) = made.run({"mask": mask, "new": torch.full((1, 1, 2), float(number))}, states)
        torch.testing.assert_close(found, before, rtol=0, atol=0)
        assert states["k"][0, 1].tolist() == [number, number]


def test_memory_that_a_state_gave_back_is_not_taken_for_the_state_s() -> None:
    """A result that happens to lie there would be copied, in another layout, by which later sums round differently.

    Whether it happens to lie there differs from process to process, and so did the last digits of figures.
    """
    lines = """
        write_state(data = x, input = k); tensor<fp32, [32, 32]> t = add(x = x, y = x);
        tensor<fp32, [32, 32]> y = transpose(perm = tensor<int32, [2]>([1, 0]), x = t);
    """
    x = torch.ones(32, 32)
    for _ in range(20):
        made = program("state<tensor<fp32, [32, 32]>> k, tensor<fp32, [32, 32]> x", lines)
        states = made.new_state()
        strides = [made.run({"x": x}, states)[0].stride() for _ in range(2)]
        assert strides == [(1, 32), (1, 32)]


CONSTANT = "tensor<fp32, [4]> c = const()[val = tensor<fp32, [4]>([0, 1, 2, 3])];"
ALIASES = {  # an output whose memory is a constant's or another output's
    "a constant itself": f"{CONSTANT} tensor<fp32, [4]> y = identity(x = c);",
    "a view of a constant": f"{CONSTANT} tensor<fp32, [1, 4]> y = expand_dims(axes = tensor<int32, [1]>([0]), x = c);",
    "a part of a constant": f"""{CONSTANT} tensor<fp32, [2]> y = slice_by_index(begin = tensor<int32, [1]>([1]),
        end = tensor<int32, [1]>([3]), x = c);""",
    "a part that an input chooses": f"""{CONSTANT} tensor<fp32, [?]> y = slice_by_index(begin = b,
        end = tensor<int32, [1]>([3]), x = c);""",
}


@pytest.mark.parametrize("name", ALIASES)
def test_what_a_caller_writes_into_an_answer_changes_no_constant(name: str) -> None:
    """Not in the run that makes the plan, not in later runs, and not for another operation."""
    lines = f"{ALIASES[name]} tensor<fp32, [4]> sum = add(x = x, y = c);"
    text = (
        f"program(1.3){{ func main<ios18>(tensor<int32, [1]> b, tensor<fp32, [4]> x) {{ {lines} }} -> (y, sum, y); }}"
    )
    made = Executable(read_text(text).functions["main"], lambda value: np.asarray(value.data), "fp32")
    for _ in range(3):
        found = made.run({"b": torch.ones(1, dtype=torch.int32), "x": torch.zeros(4)}, {})
        y, total, again = (value.clone() for value in found)
        assert total.tolist() == [0, 1, 2, 3] and y.flatten().tolist() in ([0, 1, 2, 3], [1, 2])
        assert torch.equal(y, again)
        found[0].numpy()[:] = 99
        assert torch.equal(found[2], again) and torch.equal(found[1], total)


def test_outputs_share_no_memory() -> None:
    view = "tensor<fp32, [1, 2]> y = expand_dims(axes = tensor<int32, [1]>([0]), x = a);"
    lines = f"tensor<fp32, [2]> a = add(x = x, y = x); {view}"
    text = f"program(1.3){{ func main<ios18>(tensor<fp32, [2]> x) {{ {lines} }} -> (a, y); }}"
    made = Executable(read_text(text).functions["main"], lambda value: np.asarray(value.data), "fp32")
    for _ in range(2):
        first, second = made.run({"x": torch.ones(2)}, {})
        first.numpy()[:] = 7
        assert second.tolist() == [[2, 2]]
