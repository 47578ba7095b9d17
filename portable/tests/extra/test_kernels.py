"""Kernels of the second package against torch, found as a program finds them; and what is said without the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import limits
import numpy as np
import portable_coreml
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from portable_coreml.run.ops import KERNELS, find_kernel
from portable_coreml.run.ops.registry import extra_package
from portable_coreml_extra.recurrent import lstm

X = np.random.default_rng(0).standard_normal((1, 6, 4, 5)).astype(np.float32)

CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "average pool without its padding": (
        lambda mb, x: mb.avg_pool(
            x=x, kernel_sizes=[3, 3], strides=[2, 2], pad_type="custom", pad=[1, 1, 1, 1],
            exclude_padding_from_average=True,
        ),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    ),
    "max pool, ceil": (
        lambda mb, x: mb.max_pool(x=x, kernel_sizes=[2, 2], strides=[2, 2], pad_type="valid", ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    ),
    "bilinear, half pixels": (
        lambda mb, x: mb.upsample_bilinear(x=x, scale_factor_height=2, scale_factor_width=3, align_corners=False),
        lambda x: F.interpolate(x, scale_factor=(2, 3), mode="bilinear", align_corners=False),
    ),
    "pixel shuffle": (
        lambda mb, x: mb.pixel_unshuffle(x=mb.reshape(x=x, shape=[1, 5, 6, 4]), downscale_factor=np.uint32(2)),
        lambda x: F.pixel_unshuffle(x.reshape(1, 5, 6, 4), 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_kernel_computes_what_torch_does(build_program: Callable[..., Any], name: str) -> None:
    """Interpreted (first run) and compiled (second run): torch's own result."""
    from coremltools.converters.mil import Builder as mb

    build, expected = CASES[name]
    model = build_program(lambda x: build(mb, x), {"x": X.shape})
    wanted = expected(torch.from_numpy(X)).numpy()
    for _ in range(2):
        out = next(iter(model.predict({"x": X}).values()))
        limits.numbers_agree(name, out, wanted, limits.sums("fp32", X.size))  # no sum has more than all of them


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_lstm_is_torchs(direction: str) -> None:
    """Gate order (MIL: i, f, o, z; torch: i, f, g, o), both directions, final states."""
    torch.manual_seed(0)
    both = direction == "bidirectional"
    module = torch.nn.LSTM(6, 5, bidirectional=both).eval()
    weights = {name: _reordered(value.detach()) for name, value in module.named_parameters()}
    ways = ["l0", "l0_reverse"] if both else ["l0"]
    x, h, c = torch.randn(7, 2, 6), torch.randn(len(ways), 2, 5), torch.randn(len(ways), 2, 5)
    given = {"x": x, "initial_h": torch.cat(list(h), -1), "initial_c": torch.cat(list(c), -1), "direction": direction}
    for way, suffix in zip(ways, ("", "_back"), strict=False):
        given[f"weight_ih{suffix}"], given[f"weight_hh{suffix}"] = (
            weights[f"weight_ih_{way}"],
            weights[f"weight_hh_{way}"],
        )
        given[f"bias{suffix}"] = weights[f"bias_ih_{way}"] + weights[f"bias_hh_{way}"]
    y, last_h, last_c = lstm(**given, output_sequence=True)
    wanted, (wanted_h, wanted_c) = module(x, (h, c))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(last_h, torch.cat(list(wanted_h), -1))
    torch.testing.assert_close(last_c, torch.cat(list(wanted_c), -1))


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    i, f, g, o = weight.chunk(4)
    return torch.cat([i, f, o, g])


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is not installed, in a process that has not looked for it yet."""
    for kind in [
        kind for kind, kernel in KERNELS.items() if kernel.call.__module__.startswith("portable_coreml_extra")
    ]:
        monkeypatch.delitem(KERNELS, kind)
    monkeypatch.setitem(sys.modules, "portable_coreml_extra", None)
    extra_package.cache_clear()
    yield
    extra_package.cache_clear()


def test_an_error_names_the_package_that_is_missing(build_program: Callable[..., Any], absent: None) -> None:
    from coremltools.converters.mil import Builder as mb

    model = build_program(lambda x: mb.max_pool(x=x, kernel_sizes=[2, 2], pad_type="valid"), {"x": X.shape})
    with pytest.raises(portable_coreml.UnsupportedOp, match="'max_pool' .* portable-coreml-extra, .* is not installed"):
        model.predict({"x": X})


def test_an_image_names_the_package_that_is_missing(absent: None) -> None:
    import coremltools as ct

    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    image = ct.ImageType("x", (1, 3, 4, 6))
    model = ct.convert(torch.jit.trace(Half(), torch.zeros(1, 3, 4, 6)), inputs=[image])
    with pytest.raises(portable_coreml.PortableError, match="'x' is an image; portable-coreml-extra"):
        model.predict({"x": Image.new("RGB", (6, 4))})


def test_what_no_package_has_is_unknown() -> None:
    """Looked for twice, and found in neither package."""
    assert find_kernel("nothing") is None and find_kernel("nothing") is None
