"""macOS has neither /proc nor /sys. They are hidden from the project's code; packages of Linux go on reading them."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from errno import ENOENT
from typing import Any

from simulated_mac.asking import project_asks

HIDDEN = ("/proc", "/sys")


def hide() -> None:
    """Change the functions that open files and look at them."""
    builtins.open = _hiding(builtins.open)  # type: ignore[assignment]
    io.open = builtins.open
    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
        setattr(os, name, _hiding(getattr(os, name)))


def _hiding(real: Callable[..., Any]) -> Callable[..., Any]:
    def looked(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if is_hidden(path) and project_asks(1):
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), os.fspath(path))
        return real(path, *arguments, **options)

    return looked


def is_hidden(path: Any) -> bool:
    """Return whether a path lies where a Mac has nothing."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    return isinstance(path, str) and any(path == root or path.startswith(f"{root}/") for root in HIDDEN)
