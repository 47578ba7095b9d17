"""What a stranger sends is a picture or one clear line, upright and as people see it, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardmill.errors import MediaError
from shardmill.media import pictures
from shardmill.media.pictures import ImageLimits, open_picture

from .hostile import EITHER, H, Sent, W, all_sent, frames_of, made_png, oriented, photo, saved

SENT = all_sent()


def opened(content: bytes, width: int = W, height: int = H) -> np.ndarray:
    return np.asarray(open_picture(content).resize(width, height, "bicubic"))


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: sent.name.replace(" ", "-"))
def test_what_a_stranger_sends_is_a_picture_or_a_line(sent: Sent) -> None:
    try:
        picture = open_picture(sent.content)
        assert np.asarray(picture.resize(31, 17, "lanczos")).shape == (17, 31, 3)
        assert sent.becomes in (picture.size, EITHER)
    except MediaError as error:
        said = str(error)
        assert isinstance(sent.becomes, str) and (sent.becomes == EITHER or sent.becomes in said)
        assert len(said) < 200 and said.isprintable()


def test_there_are_enough_of_them() -> None:
    assert len(SENT) > 100 and len({sent.name for sent in SENT}) == len(SENT)


@pytest.mark.parametrize("strip", [1, 500, 1 << 20])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_stands_upright(orientation: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are turned at a time."""
    monkeypatch.setattr(pictures, "STRIP", strip)
    content = oriented(orientation, "PNG")
    upright = ImageOps.exif_transpose(Image.open(BytesIO(content))).convert("RGB")
    np.testing.assert_array_equal(opened(content, *upright.size), np.asarray(upright))


@pytest.mark.parametrize("using", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(24, 50), (96, 64), (100, 11)])
def test_resizing_is_two_calls_whatever_the_strips(
    size: tuple[int, int], using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = photo(61, 83)
    resample = Image.Resampling[using.upper()]
    expected = image.resize((size[0], 83), resample).resize(size, resample)
    for strip in (61, 7 * 61, 1 << 20):
        monkeypatch.setattr(pictures, "STRIP", strip)
        told = open_picture(saved(image, "PNG")).resize(*size, using)  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.asarray(told), np.asarray(expected))


def test_what_is_transparent_is_white() -> None:
    """A colour that nobody sees is not shown to the model either."""
    hidden = Image.new("RGBA", (W, H), (200, 100, 50, 0))
    hidden.paste((10, 20, 30, 255), (0, 0, 8, 8))
    hidden.paste((0, 0, 0, 128), (8, 0, 16, 8))
    told = opened(saved(hidden, "PNG"))
    assert (
        told[4, 4].tolist() == [10, 20, 30] and told[4, 12].tolist() == [127] * 3 and told[20, 20].tolist() == [255] * 3
    )
    paletted = hidden.convert("RGB").quantize(4)
    clear = paletted.getpixel((20, 20))
    assert opened(saved(paletted, "GIF", transparency=clear))[20, 20].tolist() == [255] * 3


def test_sixteen_bits_lose_their_lower_eight() -> None:
    levels = np.arange(0, 65536, 1366, dtype=np.uint16)[None, :].repeat(H, 0)
    told = opened(saved(Image.fromarray(levels), "PNG"))
    np.testing.assert_array_equal(told, (levels >> 8).astype(np.uint8)[:, :, None].repeat(3, 2))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_picture_counts(form: str) -> None:
    frames = [Image.new("RGB", (W, H), colour) for colour in ("red", "lime", "blue")]
    content = saved(frames[0], form, save_all=True, append_images=frames[1:])
    assert len(frames_of(content)) == 3
    np.testing.assert_array_equal(opened(content), np.asarray(frames_of(content)[0]))


def test_a_picture_of_cmyk_has_its_colours() -> None:
    content = saved(Image.new("RGB", (W, H), (250, 20, 30)).convert("CMYK"), "JPEG", quality=100)
    assert np.abs(opened(content).astype(int) - (250, 20, 30)).max() <= 3


def test_nothing_is_decoded_before_the_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(MediaError, match="the picture has 48 x 32 pixels, at most 1000 pixels and sides of 16384"):
        open_picture(saved(photo(), "PNG"), ImageLimits(pixels=1000))


SIDE = 2000
LARGE = {
    "png RGBA": lambda: saved(photo(SIDE, SIDE, "RGBA"), "PNG", compress_level=1),
    "png of 16 bits": lambda: saved(photo(SIDE, SIDE, "I;16"), "PNG", compress_level=1),
    "png of 64 bits": lambda: made_png(SIDE, SIDE, bytes((1 + 8 * SIDE) * SIDE), 16, 6),
    "png paletted, with transparency": lambda: saved(photo(SIDE, SIDE, "P"), "PNG", transparency=3, compress_level=1),
    "jpeg": lambda: saved(photo(SIDE, SIDE), "JPEG", quality=95, subsampling=0),
    "jpeg progressive": lambda: saved(photo(SIDE, SIDE), "JPEG", progressive=True, subsampling=0),
    "jpeg of four colours": lambda: saved(photo(SIDE, SIDE, "CMYK"), "JPEG", progressive=True),
    "jpeg on its side": lambda: oriented(6, "JPEG", photo(SIDE, SIDE)),
    "webp RGBA": lambda: saved(photo(SIDE, SIDE, "RGBA"), "WEBP", method=0),
    "webp lossless": lambda: saved(photo(SIDE, SIDE, "RGBA"), "WEBP", lossless=True, method=0, quality=0),
    "gif": lambda: saved(photo(SIDE, SIDE, "P"), "GIF"),
    "gif with transparency": lambda: saved(photo(SIDE, SIDE, "P"), "GIF", transparency=3),
}
PEAK = """
import resource, sys
from pathlib import Path
from shardmill.media.pictures import open_picture

def peak():  # bytes; getrusage of Linux counts what the process was before it became this program
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])

content = Path(sys.argv[1]).read_bytes()
open_picture(Path(sys.argv[2]).read_bytes()).resize(64, 64, "bicubic")
before = peak()
open_picture(content).resize(896, 896, "bicubic")
print(peak() - before)
"""


@pytest.mark.thorough(but=["png RGBA", "jpeg progressive", "webp RGBA", "gif"])
@pytest.mark.parametrize("name", LARGE)
def test_a_picture_takes_bounded_memory(name: str, tmp_path: Path) -> None:
    """At most 20 bytes a pixel, as `ImageLimits` says, beside a few megabytes for a strip and the result.

    Only the decoder of WebP takes so many; a copy of the whole picture would show in the other formats.
    """
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(LARGE[name]())
    small.write_bytes(saved(photo(), Image.open(large).format or ""))
    ran = subprocess.run([sys.executable, "-c", PEAK, large, small], capture_output=True, text=True, check=True)
    most = 20 if "webp" in name else 9
    assert SIDE**2 < int(ran.stdout) < most * SIDE**2 + (16 << 20)
