"""Kernels against torch and numpy, one small program each: what a decoder emits, and the families beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import limits
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from portable_coreml.run.ops.linear import attention

RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, 6, 4, 5)).astype(np.float32)
W = RNG.standard_normal((8, 6, 1, 1)).astype(np.float32)
K = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)
B = RNG.standard_normal(4).astype(np.float32)
T = torch.from_numpy

CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "conv pointwise": (lambda mb, x: mb.conv(x=x, weight=W), lambda x: F.conv2d(x, T(W))),
    "conv grouped, same, stride": (
        lambda mb, x: mb.conv(x=x, weight=K, bias=B, groups=2, pad_type="same", strides=[2, 1]),
        lambda x: F.conv2d(F.pad(x, [1, 1, 0, 1]), T(K), T(B), stride=(2, 1), groups=2),
    ),
    "conv asymmetric pad": (
        lambda mb, x: mb.conv(x=x, weight=K, groups=2, pad_type="custom", pad=[0, 2, 1, 0]),
        lambda x: F.conv2d(F.pad(x, [1, 0, 0, 2]), T(K), groups=2),
    ),
    "matmul transposed": (
        lambda mb, x: mb.matmul(x=x, y=x, transpose_x=False, transpose_y=True),
        lambda x: x @ x.mT,
    ),
    "softmax": (lambda mb, x: mb.softmax(x=x, axis=1), lambda x: x.softmax(1)),
    "layer_norm": (
        lambda mb, x: mb.layer_norm(x=x, axes=[-1], epsilon=1e-3),
        lambda x: F.layer_norm(x, [5], eps=1e-3),
    ),
    "layer_norm on channels": (
        lambda mb, x: mb.layer_norm(x=x, axes=[1], epsilon=1e-3),
        lambda x: F.layer_norm(x.movedim(1, -1), [6], eps=1e-3).movedim(-1, 1),
    ),
    "rsqrt of squares": (
        lambda mb, x: mb.mul(
            x=x, y=mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=x), axes=[1], keep_dims=True), epsilon=1e-5)
        ),
        lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5),
    ),
    "silu": (lambda mb, x: mb.silu(x=x), F.silu),
    "gelu tanh": (lambda mb, x: mb.gelu(x=x, mode="TANH_APPROXIMATION"), lambda x: F.gelu(x, approximate="tanh")),
    "clip": (lambda mb, x: mb.clip(x=x, alpha=-0.5, beta=0.25), lambda x: x.clamp(-0.5, 0.25)),
    "reductions": (
        lambda mb, x: mb.concat(
            values=[mb.reduce_max(x=x, axes=[1], keep_dims=True), mb.reduce_l2_norm(x=x, axes=[1], keep_dims=True)],
            axis=1,
        ),
        lambda x: torch.cat([x.amax(1, keepdim=True), x.norm(dim=1, keepdim=True)], 1),
    ),
    "split and concat": (
        lambda mb, x: mb.concat(values=mb.split(x=x, split_sizes=[1, 3, 2], axis=1)[::-1], axis=1),
        lambda x: torch.cat([x[:, 4:], x[:, 1:4], x[:, :1]], 1),
    ),
    "concat interleaved": (
        lambda mb, x: mb.concat(values=[x, mb.sub(x=x, y=1.0)], axis=1, interleave=True),
        lambda x: torch.stack([x, x - 1], 2).flatten(1, 2),
    ),
    "slice with steps and masks": (
        lambda mb, x: mb.slice_by_index(
            x=x, begin=[0, 5, 1, 0], end=[1, 0, 3, 0], stride=[1, -2, 1, 1], end_mask=[False, False, False, True],
            squeeze_mask=[True, False, False, False],
        ),
        lambda x: x[0, [5, 3, 1], 1:3],
    ),
    "slice of one axis": (
        lambda mb, x: mb.slice_by_index(x=x, begin=[0, -4, 0, 0], end=[1, -1, 4, 5]),
        lambda x: x[:, -4:-1],
    ),
    "pad reflect": (
        lambda mb, x: mb.pad(x=x, pad=[1, 2, 2, 1], mode="reflect"),
        lambda x: F.pad(x, [2, 1, 1, 2], mode="reflect"),
    ),
    "transpose, reshape, tile": (
        lambda mb, x: mb.tile(x=mb.reshape(x=mb.transpose(x=x, perm=[0, 2, 1, 3]), shape=[4, -1]), reps=[1, 2]),
        lambda x: x.transpose(1, 2).reshape(4, -1).repeat(1, 2),
    ),
    "reshape that keeps extents from the right": (
        lambda mb, x: mb.reshape(x=x, shape=[0, 6, -1, 2, 0]),
        lambda x: x.reshape(1, 6, 2, 2, 5),
    ),
    "cumsum exclusive reverse": (
        lambda mb, x: mb.cumsum(x=x, axis=1, exclusive=True, reverse=True),
        lambda x: x.flip(1).cumsum(1).flip(1) - x,
    ),
    "top-k values": (lambda mb, x: mb.topk(x=x, k=2, axis=3)[0], lambda x: x.topk(2, 3)[0]),
    "gather": (lambda mb, x: mb.gather(x=x, indices=[2, -1], axis=1), lambda x: x[:, [2, 5]]),
    "select": (
        lambda mb, x: mb.select(cond=mb.greater(x=x, y=0.0), a=x, b=mb.exp(x=x)),
        lambda x: x.where(x > 0, x.exp()),
    ),
    "log with an epsilon": (lambda mb, x: mb.log(x=mb.relu(x=x), epsilon=0.25), lambda x: (x.relu() + 0.25).log()),
    "division of integers": (
        lambda mb, x: mb.cast(
            x=mb.real_div(x=mb.cast(x=mb.mul(x=x, y=100.0), dtype="int32"), y=np.int32(7)), dtype="fp32"
        ),
        lambda x: (x * 100).trunc().div(7).trunc(),
    ),
    "attention": (
        lambda mb, x: mb.matmul(x=mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1), y=x),
        lambda x: (x @ x.mT).softmax(-1) @ x,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_kernel_computes_what_torch_does(build_program: Callable[..., Any], name: str) -> None:
    """Interpreted (first run), compiled (second run) and fp16 weights aside: torch's own result."""
    from coremltools.converters.mil import Builder as mb

    build, expected = CASES[name]
    model = build_program(lambda x: build(mb, x), {"x": X.shape})
    wanted = expected(T(X)).numpy()
    for _ in range(2):
        out = next(iter(model.predict({"x": X}).values()))
        limits.numbers_agree(name, out, wanted, limits.sums("fp32", X.size))  # no sum has more than all of them


def test_fused_attention_is_scaled_by_the_width_of_a_head() -> None:
    """Not by the number of queries, which differs from it here; coremltools has the operation from iOS 18 on only."""
    values = T(np.random.default_rng(1).standard_normal((1, 6, 8, 3)).astype(np.float32))
    query, keys = T(X), torch.cat([T(X), T(X).flip(2)], 2)  # [1, heads, 4, 5] and [1, heads, 8, 5]
    hidden = torch.arange(8) > torch.arange(4)[:, None] + 4
    for mask in (None, ~hidden, torch.zeros(4, 8).masked_fill(hidden, -torch.inf)):
        wanted = F.scaled_dot_product_attention(query, keys, values, mask)
        limits.numbers_agree("attention", attention(query, keys, values, mask), wanted, limits.sums("fp32", X.size))
