"""Sequences: lstm, gru and rnn over x [steps, batch, input], reversed sequences and sliding windows.

Gate orders are MIL's: lstm i, f, o, z; gru r, o, z. "reverse" runs over the steps backwards and leaves the results
in the order they were made; "bidirectional" puts its backward half in the order of the input again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from portable_coreml.run.ops.registry import Ints, kernel
from torch import Tensor

_Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, _Activation] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "linear": lambda x: x,
    "hard_sigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0.0, 1.0),
    "sigmoid_hard": lambda x: torch.clamp(0.2 * x + 0.5, 0.0, 1.0),
    "scaled_tanh": torch.tanh,  # the scales are 1 unless a program could set them, which it can't
}


def _gates(x: Tensor, h: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None) -> Tensor:
    total = x @ weight_ih.T + h @ weight_hh.T
    return total if bias is None else total + bias


def _trimmed(steps: list[Tensor], output_sequence: bool) -> Tensor:
    return torch.stack(steps if output_sequence else steps[-1:])


def _lstm_run(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    acts: tuple[_Activation, _Activation, _Activation],
    clip: float | None,
) -> tuple[list[Tensor], Tensor]:
    """Return hidden states of every step, and the last cell state."""
    weight_ih, weight_hh, bias, peephole = weights
    recurrent, cell, final = acts
    peeps = peephole.chunk(3) if peephole is not None else None
    steps = []
    for step in x:
        i, f, o, z = _gates(step, h, weight_ih, weight_hh, bias).chunk(4, -1)
        if peeps is not None:
            i, f = i + c * peeps[0], f + c * peeps[1]
        c = recurrent(f) * c + recurrent(i) * cell(z)
        c = c if clip is None else c.clamp(-clip, clip)
        o = o if peeps is None else o + c * peeps[2]
        h = recurrent(o) * final(c)
        steps.append(h)
    return steps, c


@kernel("lstm")
def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    acts = (_ACTIVATIONS[recurrent_activation], _ACTIVATIONS[cell_activation], _ACTIVATIONS[activation])
    # coremltools gives packed sequences more rows of initial state than the batch has; Core ML reads the first ones.
    initial_h, initial_c = initial_h[: x.shape[1]], initial_c[: x.shape[1]]
    ahead = (weight_ih, weight_hh, bias, peephole)
    if direction != "bidirectional":
        source = x.flip(0) if direction == "reverse" else x
        steps, c = _lstm_run(source, initial_h, initial_c, ahead, acts, clip)
        return _trimmed(steps, output_sequence), steps[-1], c
    assert weight_ih_back is not None and weight_hh_back is not None
    back = (weight_ih_back, weight_hh_back, bias_back, peephole_back)
    (h0, h1), (c0, c1) = initial_h.chunk(2, -1), initial_c.chunk(2, -1)
    steps, c = _lstm_run(x, h0, c0, ahead, acts, clip)
    steps_back, c_back = _lstm_run(x.flip(0), h1, c1, back, acts, clip)
    backward = torch.stack(steps_back[::-1] if output_sequence else steps_back[-1:])
    out = torch.cat([_trimmed(steps, output_sequence), backward], -1)
    return out, torch.cat([steps[-1], steps_back[-1]], -1), torch.cat([c, c_back], -1)


@kernel("gru")
def gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    inner, outer = _ACTIVATIONS[recurrent_activation], _ACTIVATIONS[activation]
    width = weight_hh.shape[1]
    zeros = torch.zeros(3 * width)
    hidden_bias = (zeros if bias is None else bias).chunk(3)
    projected = x @ weight_ih.T if input_bias is None else x @ weight_ih.T + input_bias
    (w_r, w_o, w_z), h = weight_hh.chunk(3), initial_h
    steps = []
    for step in projected.flip(0) if direction == "reverse" else projected:
        x_r, x_o, x_z = step.chunk(3, -1)
        r = inner(x_r + h @ w_r.T + hidden_bias[0])
        z = inner(x_z + h @ w_z.T + hidden_bias[2])
        reset = r * (h @ w_o.T + hidden_bias[1]) if reset_after else (r * h) @ w_o.T + hidden_bias[1]
        h = (1 - z) * outer(x_o + reset) + z * h
        steps.append(h)
    return _trimmed(steps, output_sequence), h


@kernel("rnn")
def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> tuple[Tensor, Tensor]:
    act, h = _ACTIVATIONS[activation], initial_h
    steps = []
    for step in x.flip(0) if direction == "reverse" else x:
        h = act(_gates(step, h, weight_ih, weight_hh, bias))
        steps.append(h)
    return _trimmed(steps, output_sequence), h


@kernel("reverse_sequence", exact=True)
def reverse_sequence(x: Tensor, lengths: Ints, seq_axis: int, batch_axis: int = 0) -> Tensor:
    rows = list(x.unbind(batch_axis))
    axis = seq_axis % x.dim()
    axis -= axis > batch_axis % x.dim()
    for i, length in enumerate(lengths):
        head = torch.flip(rows[i].narrow(axis, 0, length), [axis])
        rows[i] = torch.cat([head, rows[i].narrow(axis, length, rows[i].shape[axis] - length)], axis)
    return torch.stack(rows, batch_axis)


@kernel("sliding_windows", exact=True)
def sliding_windows(x: Tensor, axis: int, size: int, stride: int = 1) -> Tensor:
    axis %= x.dim()
    return x.unfold(axis, size, stride).movedim(-1, axis + 1)
