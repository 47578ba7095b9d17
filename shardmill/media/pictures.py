"""A picture that a stranger sends: taken only if its header keeps the limits, decoded once, and turned upright.

Nothing is fetched and no path is opened; a picture is bytes. Decoders are other people's, so whatever they raise means
that the bytes are no picture. One picture is decoded at a time, and never copied whole, so that memory stays bounded.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from io import BytesIO
from threading import Lock

import numpy as np
from PIL import Image, UnidentifiedImageError

from shardmill.errors import MediaError
from shardmill.media.image_rules import Filter
from shardmill.printable import printable

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # what OpenAI's interface takes
ORIENTATION = 0x0112  # the tag of EXIF
# By orientation: how to turn a picture upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FROM_THE_END = (3, 4, 7, 8)  # orientations whose first row is the last one, or the last column, of what is stored
STRIP = 1 << 20  # pixels that are converted at a time
WHITE = (255, 255, 255, 255)  # what shows through: people see it, so the model shall
DECODING = Lock()


@dataclass(frozen=True)
class ImageLimits:
    """Limits on a picture, judged before it is decoded.

    Attributes:
        bytes: the encoded picture's size.
        pixels: width times height. A decoder takes up to 20 bytes for each.
        side: the longer side in pixels.
        scans: of a JPEG: each passes over all pixels, so a small file can take hours. Encoders write about ten.
    """

    bytes: int = 20 << 20
    pixels: int = 50_000_000
    side: int = 16_384
    scans: int = 64


LIMITS = ImageLimits()


@dataclass(frozen=True)
class Picture:
    """A decoded picture in the mode in which its file has it, and how its camera was held.

    Attributes:
        image: the pixels as stored.
        orientation: 1 to 8, as EXIF counts.
    """

    image: Image.Image
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Return (width, height) of the upright picture."""
        width, height = self.image.size
        return (height, width) if self.orientation >= 5 else (width, height)

    def resize(self, width: int, height: int, using: Filter) -> Image.Image:
        """Return the upright picture in RGB, resized: first its width, then its height, with 8 bits between.

        Pillow's own order hangs on its version and on the shape. The first resizing treats each row alone, so strips of
        rows give the same pixels as the whole.

        Args:
            width: pixels of the result's width.
            height: pixels of its height.
            using: the filter.
        """
        resample, (wide, high) = Image.Resampling[using.upper()], self.size
        narrowed = Image.new("RGB", (width, high))
        step = max(1, STRIP // wide)
        for top in range(0, high, step):
            strip = self._strip(top, min(top + step, high))
            narrowed.paste(strip.resize((width, strip.height), resample), (0, top))
        return narrowed.resize((width, height), resample)

    def _strip(self, top: int, bottom: int) -> Image.Image:
        """Return rows of the upright picture in RGB."""
        across = self.orientation >= 5  # a row of the upright picture is a column of the stored one
        width, height = self.image.size
        if self.orientation in FROM_THE_END:
            length = width if across else height
            top, bottom = length - bottom, length - top
        box = (top, 0, bottom, height) if across else (0, top, width, bottom)
        strip = _coloured(self.image.crop(box))
        turn = TURNS.get(self.orientation)
        return strip if turn is None else strip.transpose(turn)


def open_picture(content: bytes, limits: ImageLimits = LIMITS) -> Picture:
    """Decode a picture.

    Args:
        content: the bytes of a PNG, JPEG, WebP or GIF file; of an animation the first picture counts.
        limits: what is refused before anything is decoded.

    Raises:
        MediaError: one line that says what is wrong with it.
    """
    if len(content) > limits.bytes:
        raise MediaError(f"the picture has {len(content)} bytes, at most {limits.bytes} are allowed: shrink it")
    with DECODING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that are odd but readable; sizes are judged below
        try:
            image = Image.open(BytesIO(content), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise MediaError(f"the picture is too large: at most {limits.pixels} pixels are allowed") from error
        except UnidentifiedImageError as error:
            known = ", ".join(FORMATS)
            raise MediaError(f"the picture is in no known format ({known}), or its header is damaged") from error
        except Exception as error:  # decoders may raise any exception
            raise _unreadable(error) from error
        width, height = image.size
        if width * height > limits.pixels or max(width, height) > limits.side:
            most = f"{limits.pixels} pixels and sides of {limits.side}"
            raise MediaError(f"the picture has {width} x {height} pixels, at most {most} are allowed: shrink it")
        # A mark within the pixels of a JPEG would have a zero after its first byte, so each of these begins a scan.
        if content.startswith(b"\xff\xd8") and content.count(b"\xff\xda") > limits.scans:
            raise MediaError(f"the picture has more than {limits.scans} scans: save it again")
        try:
            image.load()
            orientation = image.getexif().get(ORIENTATION, 1)
        except Exception as error:  # decoders may raise any exception
            raise _unreadable(error) from error
    return Picture(image, orientation if orientation in TURNS else 1)


def _unreadable(error: Exception) -> MediaError:
    """Return what a decoder's exception means."""
    said = printable(str(error).partition("\n")[0])[:100] or type(error).__name__
    return MediaError(f"the picture is damaged: {said}")


def _coloured(image: Image.Image) -> Image.Image:
    """Return an image in RGB; what is transparent is put on white, as transformers does."""
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would make white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")
