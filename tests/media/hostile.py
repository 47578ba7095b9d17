"""Pictures that strangers send, each with what becomes of it: a size, or what the refusal says, or either."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageSequence

EITHER = "either"
W, H = 48, 32
DAMAGED = "the picture is damaged: "
UNKNOWN = "the picture is in no known format (PNG, JPEG, WEBP, GIF), or its header is damaged"
TOO_MANY = "at most 50000000 pixels"


class Sent(NamedTuple):
    name: str
    content: bytes
    becomes: tuple[int, int] | str


def photo(width: int = W, height: int = H, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width + height)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (height, width), dtype=np.uint16))
    coloured = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8))
    return coloured if mode == "RGBA" else coloured.convert("RGB").convert(mode)


def saved(image: Image.Image, form: str, **more: object) -> bytes:
    file = BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def oriented(orientation: int, form: str, image: Image.Image | None = None) -> bytes:
    image = photo() if image is None else image
    exif = image.getexif()
    exif[0x0112] = orientation
    return saved(
        image,
        form,
        exif=exif,
        **({"quality": 95} if form == "JPEG" else {}),
        **({"lossless": True} if form == "WEBP" else {}),
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def made_png(
    width: int, height: int, rows: bytes, depth: int = 8, colour: int = 2, more: bytes = b"", interlaced: int = 0
) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    body = chunk(b"IDAT", zlib.compress(rows, 9)) if rows else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + body + chunk(b"IEND", b"")


def black_png(width: int, height: int) -> bytes:
    """A PNG of zeros in one bit a pixel, which is small."""
    return made_png(width, height, bytes((1 + (width + 7) // 8) * height), depth=1, colour=0)


def bomb(kind: bytes) -> bytes:
    """A chunk of text or of a colour profile that is 100 MB once it is inflated."""
    before = {b"iTXt": b"a\0\1\0\0\0", b"zTXt": b"a\0\0", b"iCCP": b"a\0\0"}[kind]
    return chunk(kind, before + zlib.compress(bytes(100_000_000), 9))


def jpeg_of_scans(scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    whole = saved(photo(), "JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * scans + whole[-2:]


def of_all_modes() -> Iterator[Sent]:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        yield Sent(f"png {mode}", saved(photo(mode=mode), "PNG"), (W, H))
    yield Sent("png P with transparency", saved(photo(mode="P"), "PNG", transparency=3), (W, H))
    yield Sent("png L with transparency", saved(photo(mode="L"), "PNG", transparency=3), (W, H))
    yield Sent("png RGB with transparency", saved(photo(), "PNG", transparency=(1, 2, 3)), (W, H))
    rng = np.random.default_rng(0)
    for depth, colour, numbers in [(16, 2, 3), (16, 4, 2), (16, 6, 4), (16, 0, 1)]:
        wide = b"".join(b"\0" + rng.bytes(2 * numbers * W) for _ in range(H))
        yield Sent(f"png of 16 bits, colour {colour}", made_png(W, H, wide, depth, colour), (W, H))
        if colour in (0, 2):
            clear = chunk(b"tRNS", b"\0\1" * numbers)
            yield Sent(f"png of 16 bits, colour {colour}, clear", made_png(W, H, wide, depth, colour, clear), (W, H))
    yield Sent("png interlaced", made_png(1, 1, b"\0\1\2\3", interlaced=1), (1, 1))
    for mode in ("L", "RGB", "CMYK"):
        yield Sent(f"jpeg {mode}", saved(photo(mode=mode), "JPEG"), (W, H))
        yield Sent(f"jpeg {mode} progressive", saved(photo(mode=mode), "JPEG", progressive=True), (W, H))
    for mode in ("RGB", "RGBA"):
        for lossless in (False, True):
            yield Sent(f"webp {mode} {lossless}", saved(photo(mode=mode), "WEBP", lossless=lossless), (W, H))
    yield Sent("gif", saved(photo(mode="P"), "GIF"), (W, H))
    yield Sent("gif with transparency", saved(photo(mode="P"), "GIF", transparency=3), (W, H))
    for form in ("GIF", "WEBP", "PNG"):
        frames = [photo(), photo(mode="L").convert("RGB"), photo().rotate(180)]
        yield Sent(f"animated {form}", saved(frames[0], form, save_all=True, append_images=frames[1:]), (W, H))
    yield Sent("mpo", saved(photo(), "MPO", save_all=True, append_images=[photo(8, 8)]), (W, H))
    yield Sent("one pixel", saved(photo(1, 1), "PNG"), (1, 1))


def of_all_orientations() -> Iterator[Sent]:
    for form in ("JPEG", "PNG", "WEBP"):
        for orientation in range(10):  # 0 and 9 mean nothing
            size = (H, W) if 5 <= orientation <= 8 else (W, H)
            yield Sent(f"{form} of orientation {orientation}", oriented(orientation, form), size)


def too_large() -> Iterator[Sent]:
    yield Sent("png 13000 x 13000", black_png(13_000, 13_000), TOO_MANY)
    yield Sent("png 10000 x 10000", black_png(10_000, 10_000), TOO_MANY)
    yield Sent("png 100 Mpx by header", made_png(10_000, 10_000, b""), TOO_MANY)
    yield Sent("png 4 Gpx by header", made_png(1 << 16, 1 << 16, b""), TOO_MANY)
    yield Sent("png of the largest numbers", made_png((1 << 31) - 1, (1 << 31) - 1, b""), TOO_MANY)
    yield Sent("png of no pixels", made_png(0, 0, b"\0"), EITHER)
    yield Sent("png of one long side", black_png(16_385, 1), "sides of 16384")
    jpeg = bytearray(saved(photo(), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = b"\xff\xff\xff\xff"
    yield Sent("jpeg 65535 x 65535 by header", bytes(jpeg), TOO_MANY)
    gif = bytearray(saved(photo(mode="P"), "GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    yield Sent("gif 65535 x 65535 by header", bytes(gif), TOO_MANY)
    gif = bytearray(saved(photo(mode="P"), "GIF"))
    at = gif.index(b"\x2c" + bytes(4))
    gif[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    yield Sent("gif whose frame is larger", bytes(gif), TOO_MANY)
    webp = saved(photo(mode="RGBA"), "WEBP", save_all=True, append_images=[photo(mode="RGBA").rotate(180)])
    yield Sent("webp 16384 x 16384 by header", webp[:24] + b"\xff\x3f\0" * 2 + webp[30:], TOO_MANY)
    yield Sent("webp 10000 x 10000 by header", webp[:24] + b"\x0f\x27\0" * 2 + webp[30:], TOO_MANY)
    yield Sent("20 MB and a byte", bytes((20 << 20) + 1), "at most 20971520 are allowed")
    for kind in (b"zTXt", b"iTXt", b"iCCP"):
        content = made_png(1, 1, b"\0\1\2\3", more=bomb(kind))
        yield Sent(f"png with a bomb in {kind.decode()}", content, EITHER)
    yield Sent("jpeg of 63 scans more", jpeg_of_scans(50), EITHER)
    yield Sent("jpeg of 5000 scans", jpeg_of_scans(5000), "more than 64 scans")


def cut_short() -> Iterator[Sent]:
    whole = {form: saved(photo(), form) for form in ("PNG", "JPEG", "WEBP", "GIF")}
    for form, content in whole.items():
        for percent in (1, 10, 33, 50, 90):
            cut = content[: max(1, len(content) * percent // 100)]
            yield Sent(f"{form}, {percent} %", cut, "the picture is")


def of_other_types() -> Iterator[Sent]:
    for form in ("BMP", "TIFF", "ICO", "PPM", "TGA", "PDF", "EPS", "JPEG2000"):
        yield Sent(form, saved(photo(), form), UNKNOWN)
    texts = {
        "empty": b"",
        "text": b"hello world " * 100,
        "html": b"<html><img src='x.png'></html>",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        "a path": b"/etc/passwd",
        "a url": b"https://example.com/x.png",
        "a data uri": b"data:image/png;base64,iVBORw0KGgo=",
        "zip": b"PK\3\4" + bytes(60),
        "heic": b"\0\0\0\x18ftypheic" + bytes(60),
        "avif": b"\0\0\0\x18ftypavif" + bytes(60),
        "wav": b"RIFF\x24\0\0\0WAVEfmt " + bytes(60),
        "zeros": bytes(1000),
        "signature of png alone": b"\x89PNG\r\n\x1a\n",
        "signature of jpeg alone": b"\xff\xd8\xff",
        "signature of gif alone": b"GIF89a",
        "signature of webp alone": b"RIFF\0\0\0\0WEBPVP8 ",
    }
    yield from (Sent(name, content, "the picture is") for name, content in texts.items())


def damaged() -> Iterator[Sent]:
    yield Sent("png without pixels", made_png(9, 9, b""), DAMAGED)
    yield Sent("png with too few rows", made_png(9, 9, b"\0" * 28), EITHER)
    yield Sent("png with an unknown filter", made_png(2, 2, b"\x09" * 14), EITHER)
    yield Sent("png without its palette", made_png(9, 9, bytes(90), colour=3), EITHER)
    yield Sent("png of an unknown colour", made_png(9, 9, bytes(90), colour=5), "the picture is")
    good = saved(photo(), "PNG")
    yield Sent("png with a wrong checksum", good[:29] + b"\0\0\0\0" + good[33:], "the picture is")
    yield Sent("png that goes on", good + bytes(1000), (W, H))
    drawn = random.Random(0)
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        for k in range(5):
            content = bytearray(saved(photo(), form))
            for _ in range(8):
                content[drawn.randrange(len(content))] = drawn.randrange(256)
            yield Sent(f"{form} with noise {k}", bytes(content), EITHER)


def all_sent() -> list[Sent]:
    kinds = (of_all_modes, of_all_orientations, too_large, cut_short, of_other_types, damaged)
    return [sent for kind in kinds for sent in kind()]


def frames_of(content: bytes) -> list[Image.Image]:
    """All pictures of an animation, in RGB."""
    return [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(BytesIO(content)))]
