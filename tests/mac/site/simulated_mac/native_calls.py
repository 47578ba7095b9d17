"""How calls of the native module fail: as pybind11 and Objective-C do."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from simulated_mac import log


def ns_error(text: str, **others: str) -> RuntimeError:
    """Return an NSError as Python sees it: userInfo, a dictionary in several lines (CoreMLPythonUtils.mm:38-42).

    Args:
        text: NSLocalizedDescription.
        others: further entries, such as NSUnderlyingError.
    """
    entries = {"NSLocalizedDescription": text, **others}
    lines = [f"    {key} = {_quoted(value)};" for key, value in sorted(entries.items())]
    return RuntimeError("\n".join(("{", *lines, "}")))


def _quoted(text: str) -> str:
    """Return a string as NSDictionary describes it: ASCII, escaped, and in quotes where it is more than a word."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    escaped = escaped.encode("ascii", "backslashreplace").decode()
    return escaped if escaped.isalnum() else f'"{escaped}"'


def wrong_arguments(name: str) -> TypeError:
    """Return pybind11's error for a wrong signature; no argument has a name (CoreMLPython.mm:1066-1090)."""
    return TypeError(f"{name}(): incompatible function arguments. The following argument types are supported: ...")


def demand(fits: bool, name: str) -> None:
    """Raise TypeError unless a call's arguments fit the signature."""
    if not fits:
        raise wrong_arguments(name)


def is_text(*values: Any) -> bool:
    """Return whether pybind11 makes a std::string of each."""
    return all(isinstance(value, str | bytes) for value in values)


def abort(why: str, **details: Any) -> NoReturn:
    """End the process as an assertion of C, or an exception of Objective-C that nothing catches, does."""
    log.write("abort", why=why, **details)
    print(f"Assertion failed: {why}", file=sys.stderr, flush=True)
    os.abort()
