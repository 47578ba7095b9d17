"""Puts the portable engine where coremltools looks for Core ML. Only this module changes anything outside the package.

coremltools reaches Core ML through one native module and checks the platform in three ways. On a machine without Core
ML:
- `coremltools.libcoremlpython` becomes our module, also in modules that tried to import it before and kept None.
- `_macos_version()` returns `MACOS_VERSION`, the newest version that coremltools 9.0 knows, so that nothing is
  refused for age.
- `_is_macos()` is true where make_state() calls it. `_IS_MACOS`, which tests and remote-device code read, stays false.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from portable_coreml.errors import PortableError

COREMLTOOLS = ("9.0", "9.1.dev1")  # that were tried; others call the native module otherwise
MACOS_VERSION = (26, 0)
_NATIVE = "coremltools.libcoremlpython"
_CONSUMERS = (
    "coremltools.models.model",
    "coremltools.models.compute_plan",
    "coremltools.models.compute_device",
    "coremltools.models._compiled_model",
)
_PLATFORM_CHECKS = ("coremltools.models.utils", "coremltools.models.model", "coremltools.models._compiled_model")
_settings = {"emulated": False}  # whether the engine takes Core ML's place although that is here


class _OnlyErrors(logging.Filter):
    """coremltools warns "Failed to load _MLModelProxy" while it is imported for the first time.

    We mend that right after.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Failed to load _ML")


def native_present() -> bool:
    """Return whether coremltools has its own native module here, that is, whether this is a Mac."""
    if _settings["emulated"]:
        return False
    if sys.platform == "darwin":
        return True
    native = sys.modules.get(_NATIVE)
    return native is not None and getattr(native, "__file__", None) is not None


def check_coremltools() -> None:
    """Raise PortableError unless the installed coremltools is one of COREMLTOOLS; it is not imported."""
    try:
        version = importlib.metadata.version("coremltools")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version not in COREMLTOOLS:
        taken = " or ".join(COREMLTOOLS)
        raise PortableError(f"coremltools {version} is installed; it must be {taken}: pip install coremltools==9.0")


def put(native: ModuleType) -> None:
    """Install `native` into coremltools, imported or not. Idempotent.

    Raises:
        PortableError: another version of coremltools is installed than those that were tested.
    """
    check_coremltools()
    sys.modules[_NATIVE] = native
    quiet = _OnlyErrors()
    logger = logging.getLogger("coremltools")
    logger.addFilter(quiet)
    try:
        import coremltools
    finally:
        logger.removeFilter(quiet)
    coremltools.libcoremlpython = native
    for name in _CONSUMERS:
        consumer = sys.modules[name]
        for attribute in vars(native):
            if attribute.startswith("_ML") and hasattr(consumer, attribute):
                setattr(consumer, attribute, getattr(native, attribute))
    for name in _PLATFORM_CHECKS:
        checks = sys.modules[name]
        if hasattr(checks, "_macos_version"):
            checks._macos_version = _macos_version  # type: ignore[attr-defined]
        if hasattr(checks, "_is_macos"):
            checks._is_macos = _is_macos  # type: ignore[attr-defined]


@contextmanager
def emulated() -> Iterator[None]:
    """Load models inside on this engine, also where Core ML is, whose own module is put back afterwards.

    Raises:
        RuntimeError: inside of another such block.
    """
    import coremltools

    if _settings["emulated"]:
        raise RuntimeError("the portable engine has taken Core ML's place already")
    places = [coremltools, *(sys.modules[name] for name in {*_CONSUMERS, *_PLATFORM_CHECKS})]
    before = [(place, name, value) for place in places for name, value in vars(place).items() if _is_changed(name)]
    native = sys.modules.get(_NATIVE)
    _settings["emulated"] = True
    try:
        yield
    finally:
        _settings["emulated"] = False
        for place, name, value in before:
            setattr(place, name, value)
        if native is None:
            sys.modules.pop(_NATIVE, None)
        else:
            sys.modules[_NATIVE] = native


def _is_changed(name: str) -> bool:
    """Return whether `put` may change an attribute of a module of coremltools."""
    return name.startswith("_ML") or name in ("libcoremlpython", "_macos_version", "_is_macos")


def _macos_version() -> tuple[int, ...]:
    return MACOS_VERSION


def _is_macos() -> bool:
    return True
