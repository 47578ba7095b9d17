"""Names file systems, so that two machines that mount the same one call it the same.

The kernel numbers what is mounted in the order of mounting, so on each client of a file server the same file has
another device number. Where a file system comes from is the same everywhere. On a Mac a volume may have another number
after each start; where it is mounted and when it was made stay as they are.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")  # Linux only
OF_A_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "fuse.glusterfs", "wekafs", "9p")
)


def volume(device: int, path: Path) -> str:
    """Name a file system.

    Args:
        device: its number here.
        path: a file in it.

    Returns:
        Where a network's comes from; on a Mac its topmost folder and the time when it was made; otherwise the number.
    """
    return _of_a_mac(device, path.resolve()) if sys.platform == "darwin" else _mounted(device)


def _of_a_mac(device: int, path: Path) -> str:
    """Name the topmost folder of a file's volume, and when it was made: disks may be mounted at one place in turn."""
    *_, top = (folder for folder in (path, *path.parents) if os.stat(folder).st_dev == device)
    return f"{top} {getattr(os.stat(top), 'st_birthtime', 0)}"


@cache
def _mounted(device: int) -> str:
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return str(device)
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        # 36 35 98:0 /root /mounted/at options [optional fields] - type source options
        before, _, after = line.partition(" - ")
        kind, source, *_ = (*after.split(), "", "")
        if before.split()[2:3] == [number] and kind in OF_A_NETWORK:
            return _unescaped(source)
    return str(device)


def _unescaped(text: str) -> str:
    """The kernel writes spaces and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
