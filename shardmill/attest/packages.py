"""The Python packages that a build ran with, as package URLs (https://github.com/package-url/purl-spec)."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shardmill.attest.statement import package_url
from shardmill.files import parse_json

OURS = ("shardmill", "portable-coreml")
SHA256 = re.compile(r"[0-9a-f]{64}")


def interpreter() -> dict[str, Any]:
    """Return the Python that ran."""
    name = platform.python_implementation().lower()
    return {"name": name, "uri": str(PackageURL("generic", None, name, platform.python_version()))}


def package_descriptors(deciding: Iterable[str]) -> list[dict[str, Any]]:
    """Return a resource descriptor of each package that is installed here and needed, by name.

    Args:
        deciding: packages whose versions decide bytes; they are marked.
    """
    marked = {canonicalize_name(name) for name in deciding}
    rows = []
    for name in sorted(_needed({*marked, *OURS})):
        row: dict[str, Any] = {"name": name, "uri": package_url(name, metadata.version(name))}
        found = _wheel_hash(name)
        if found:
            row["digest"] = {"sha256": found}
        if name in marked:
            row["annotations"] = {"decides": "bytes"}
        rows.append(row)
    return rows


def versions(dependencies: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return versions by name of the Python packages among resolved dependencies."""
    urls = [PackageURL.from_string(row["uri"]) for row in dependencies if row.get("uri", "").startswith("pkg:pypi/")]
    return {url.name: str(url.version) for url in urls}


def installed(name: str) -> str:
    """Return a package's installed version; empty if the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _needed(roots: Iterable[str]) -> set[str]:
    """Return the installed packages among these packages and all their requirements."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found and installed(name):
            found.add(name)
            waiting += _requirements(name)
    return found


def _requirements(name: str) -> Iterator[str]:
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _wheel_hash(name: str) -> str:
    """Return sha256 of the archive that a package was installed from, if the installer recorded it (PEP 610)."""
    text = metadata.distribution(name).read_text("direct_url.json")
    try:
        found = str(parse_json(text or "{}")["archive_info"]["hashes"]["sha256"])
    except (ValueError, LookupError, TypeError):
        return ""
    return found if SHA256.fullmatch(found) else ""
