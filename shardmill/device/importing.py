"""Imports a device's results: copies them unchanged beside their builds."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.evidence.file import Evidence, file_name, of_build, read_result
from shardmill.evidence.folder import FOLDER
from shardmill.files import replacing
from shardmill.runtime.manifest import COMPLETE, read_manifest


def import_result(file: Path, builds: Sequence[Path]) -> list[tuple[Path, Evidence]]:
    """Copy a result beside the builds that it measured.

    Args:
        file: result.json of measure.py.
        builds: folders of finished builds.

    Returns:
        Each build, the imported file, and its evidence for that build.

    Raises:
        ShardmillError: the file is not a result or was changed, it measured none of the builds, or a build has another
            result of the same chip and system.
    """
    content = read_result(file)
    found = []
    for build in builds:
        target = build / FOLDER / file_name(content)
        evidence = of_build(target, content, read_manifest(build, COMPLETE))
        if evidence is not None:
            found.append((build, target, evidence))
    if not found:
        if not builds:
            raise ShardmillError(f"{file}: there is no finished build here; name the one that it is of")
        names = ", ".join(map(str, builds))
        raise ShardmillError(f"{file}: its programs ({', '.join(content['variants'])}) are not those of {names}")
    for _, target, _ in found:
        if target.parent.exists() and not target.parent.is_dir():
            raise ShardmillError(f"{target.parent}: is no folder, so no evidence can lie there; remove it")
        if target.is_dir() or (target.exists() and target.read_bytes() != file.read_bytes()):
            raise ShardmillError(f"{target} holds another run on that chip and system; remove it to take this one")
    for _, target, _ in found:
        with replacing(target) as temporary:
            shutil.copyfile(file, temporary)
    return [(target, evidence) for _, target, evidence in found]
