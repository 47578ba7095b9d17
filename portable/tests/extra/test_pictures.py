"""Image inputs and outputs go through coremltools' own API with the right channels, sizes and modes."""

from __future__ import annotations

from pathlib import Path

import coremltools as ct
import numpy as np
import portable_coreml
import pytest
import torch
from PIL import Image


@pytest.fixture(scope="module", params=["RGB", "BGR", "GRAYSCALE"])
def halver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A program that halves an image of 4 x 3 and gives one back."""
    layout = getattr(ct.colorlayout, request.param)
    channels = 1 if request.param == "GRAYSCALE" else 3

    class Halve(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image * 0.5

    model = ct.convert(
        torch.jit.trace(Halve(), torch.zeros(1, channels, 3, 4)),
        inputs=[ct.ImageType(name="image", shape=(1, channels, 3, 4), color_layout=layout)],
        outputs=[ct.ImageType(name="half", color_layout=layout)],
        minimum_deployment_target=ct.target.iOS16,
        skip_model_load=True,
    )
    path = tmp_path_factory.mktemp("images") / f"{request.param}.mlpackage"
    model.save(str(path))
    return request.param, path


def picture(layout: str) -> Image.Image:
    """Even values, other ones in each channel."""
    shape = (3, 4) if layout == "GRAYSCALE" else (3, 4, 3)
    return Image.fromarray((np.arange(np.prod(shape)).reshape(shape) * 4).astype(np.uint8))


def test_round_trip(halver: tuple[str, Path]) -> None:
    """Channels come back in the order they went in, whatever order the program sees."""
    layout, path = halver
    portable_coreml.install(precision="fp32")
    given = picture(layout)
    result = ct.models.MLModel(str(path)).predict({"image": given})["half"]
    assert np.array_equal(np.asarray(result), np.asarray(given) // 2)


def test_wrong_size_is_refused(halver: tuple[str, Path]) -> None:
    """An image of another size is named, not resized."""
    layout, path = halver
    portable_coreml.install(precision="fp32")
    model = ct.models.MLModel(str(path))
    with pytest.raises(portable_coreml.InputError, match="4 x 3"):
        model.predict({"image": picture(layout).resize((5, 3))})


@pytest.mark.parametrize("listed", [False, True])
def test_flexible_sizes_are_checked(listed: bool) -> None:
    """An image whose size is not allowed was taken as it came."""
    from coremltools.proto import Model_pb2
    from portable_coreml_extra.pictures import image_to_array

    message = Model_pb2.FeatureDescription(name="x")
    kind = message.type.imageType
    kind.width, kind.height, kind.colorSpace = 16, 8, 20
    if listed:
        for width, height in ((16, 8), (32, 8)):
            kind.enumeratedSizes.sizes.add(width=width, height=height)
    else:
        for extent, upper in ((kind.imageSizeRange.widthRange, 32), (kind.imageSizeRange.heightRange, -1)):
            extent.lowerBound, extent.upperBound = 8, upper
    for size in ((16, 8), (32, 8)):
        assert image_to_array(Image.new("RGB", size), message, "x").shape == (1, 3, size[1], size[0])
    allowed = "16 x 8 or 32 x 8" if listed else r"8\.\.\.32 x 8\.\.\."
    for size in ((33, 8), (16, 7)):
        with pytest.raises(
            portable_coreml.InputError, match=f"'x' is an image of {allowed}, not {size[0]} x {size[1]}"
        ):
            image_to_array(Image.new("RGB", size), message, "x")
