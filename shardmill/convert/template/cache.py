"""Keeps samples between processes: one makes those of a kind, whoever else needs them at that time waits for it.

The file of a kind of part lies in a folder named by the tools that decide its samples, so what other tools left there
can be told by its name (`shardmill gc`). Samples are small (0.2 MB) and belong to no build.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill.files import digest, write_json
from shardmill.pipeline.fingerprint import code_digest, package_versions

CODE = ("shardmill.convert.template.sample",)
PACKAGES = ("coremltools", "numpy", "torch")


def tools() -> str:
    """Digest of what decides samples besides their kind."""
    return digest({"code": code_digest(CODE), "packages": package_versions(PACKAGES)})


def shared(cache: Path, kind: Any, make: Callable[[], list[bytes]]) -> list[bytes]:
    """The samples of a kind: those that are kept, else what `make` gives. A kind is plain data."""
    file = cache / tools() / f"{digest(kind)}.json"
    specs = read(file)
    if specs is None:
        with locked(file.with_suffix(".lock")):
            specs = read(file)
            if specs is None:
                specs = make()
                write(file, specs)
    return specs


def outdated(cache: Path) -> Iterable[Path]:
    """What tools other than the present ones left in the cache."""
    current = tools()
    return (path for path in sorted(cache.iterdir() if cache.is_dir() else ()) if path.name != current)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Holds a lock that ends with its process, and waits for it as long as it takes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def write(file: Path, specs: list[bytes]) -> None:
    """Keeps samples, with the sha256 by which they are known to be whole."""
    content = {"sha256": checksum(specs), "samples": [b64encode(spec).decode() for spec in specs]}
    write_json(file, content)


def read(file: Path) -> list[bytes] | None:
    """Samples that were kept, None where there are none or they are damaged."""
    try:
        content = json.loads(file.read_text())
        specs = [b64decode(sample) for sample in content["samples"]]
        return specs if content["sha256"] == checksum(specs) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checksum(specs: list[bytes]) -> str:
    """sha256 of samples."""
    return hashlib.sha256(b"".join(hashlib.sha256(spec).digest() for spec in specs)).hexdigest()
