"""Root may read and write whatever it likes, so what a mode forbids is tried without that right."""

from __future__ import annotations

import os
import shutil

import pytest

RIGHTS = "-dac_override,-dac_read_search"


def unprivileged() -> list[str]:
    """What a command begins with that is to obey the modes of files."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root without setpriv can't give up its rights")
    return ["setpriv", f"--bounding-set={RIGHTS}", f"--inh-caps={RIGHTS}"]
