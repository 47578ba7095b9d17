"""Who asks: packages with Linux binaries must go on seeing Linux, or they would look for a Mac's libraries."""

from __future__ import annotations

import sys
from types import FrameType

# Packages that choose libraries and system calls by the platform; truststore loads macOS's libraries.
OF_LINUX = {
    *("PIL", "aiohttp", "greenlet", "matplotlib", "numpy", "pandas"),
    *("psutil", "scipy", "soundfile", "sqlalchemy", "torch", "truststore"),
}
OWN = frozenset(("drafted_decoding", "kit_runner", "portable_coreml", "shardmill"))


def package(frame: FrameType) -> str:
    """Return the name of the package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def linux_asks(depth: int) -> bool:
    """Return whether a package of Linux asks.

    Args:
        depth: frames between the caller and the code that asks.
    """
    return package(sys._getframe(depth + 1)) in OF_LINUX


def project_asks(depth: int) -> bool:
    """Return whether the code that asks, its standard library functions aside, is the project's, or a script's.

    Args:
        depth: frames between the caller and the code that asks.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and package(frame) in sys.stdlib_module_names:
        if package(frame) == "__main__":
            break
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return package(frame) in OWN or not ("site-packages" in file or file.startswith("<frozen"))
