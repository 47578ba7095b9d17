"""What the system is called: sys.platform, platform.*, os.uname. Who asks decides (asking.py)."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from simulated_mac.asking import linux_asks

VERSION = os.environ.get("MAC_PYTHON_SAYS") or os.environ.get("MAC_VERSION") or "15.6"
RELEASE = "24.6.0"  # of the kernel
KERNEL = f"Darwin Kernel Version {RELEASE}"


class Platform(str):
    """sys.platform: "darwin", and "linux" for packages of Linux."""

    def _seen(self) -> str:
        return "linux" if linux_asks(2) else "darwin"

    def __eq__(self, other: object) -> bool:
        return self._seen() == other

    def __ne__(self, other: object) -> bool:
        return self._seen() != other

    def __hash__(self) -> int:
        return hash(self._seen())

    def __contains__(self, part: object) -> bool:
        return str(part) in self._seen()

    def __getitem__(self, index: Any) -> str:
        return self._seen()[index]

    def __str__(self) -> str:
        return self._seen()

    def __format__(self, spec: str) -> str:
        return format(self._seen(), spec)

    def startswith(self, *arguments: Any) -> bool:
        return self._seen().startswith(*arguments)

    def lower(self) -> str:
        return self._seen()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("darwin",)


def rename() -> None:
    """Change sys.platform, before any module is imported that asks for it."""
    # Where Python's own settings lie has the platform in its name; the files are Linux's.
    os.environ.setdefault("_PYTHON_SYSCONFIGDATA_NAME", sysconfig._get_sysconfigdata_name())
    sysconfig.get_config_vars()
    sys.platform = Platform("darwin")


def change() -> None:
    """Change the answers of platform and os."""
    import platform  # which imports much

    uname = platform.uname_result("Darwin", "mac.local", RELEASE, KERNEL, "arm64")
    answers: dict[str, Any] = {
        "system": "Darwin",
        "node": "mac.local",
        "release": RELEASE,
        "version": KERNEL,
        "machine": "arm64",
        "processor": "arm",
        "mac_ver": (VERSION, ("", "", ""), "arm64"),
        "libc_ver": ("", ""),
        "platform": f"macOS-{VERSION}-arm64-arm-64bit",
        "uname": uname,
    }
    before = platform.uname()
    for name, answer in answers.items():
        real = before if name == "uname" else getattr(before, name) if name in before._fields else answer
        setattr(platform, name, _answering(answer, real))
    os.uname = _answering(os.uname_result(tuple(uname)[:5]), os.uname())


def _answering(answer: Any, to_linux: Any) -> Callable[..., Any]:
    """Return a function that gives packages of Linux another answer than all others."""

    def asked(*arguments: Any, **options: Any) -> Any:
        return to_linux if linux_asks(1) else answer

    return asked
