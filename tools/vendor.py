"""Fetch the libraries of others that the page to chat with carries, and compare them with what npm publishes.

    python tools/vendor.py [--check] [--axe FOLDER]

Writes the files into shardmill/serve/page/, as they are in the packages. With --check it writes nothing, and exits with
1 if a file differs. --axe writes axe-core, by which tests judge the pages, into a folder. It needs npm: `npm pack`
fetches a package, whose sha512 must be the one below (npm shows it as `dist.integrity`). NOTICE names the versions, and
tests/serve/test_pages.py holds NOTICE, this table and the files together.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "shardmill/serve/page"


@dataclass(frozen=True)
class Library:
    """A package of npm's, and the file of it that is used.

    Attributes:
        name, version: the package's.
        file: in the package.
        package_sha512: of the package, in base64.
        sha256: of the file.
    """

    name: str
    version: str
    file: str
    package_sha512: str
    sha256: str


PAGES = (
    Library(
        "marked",
        "18.2.1",
        "lib/marked.esm.js",
        "ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    ),
    Library(
        "dompurify",
        "3.5.0",
        "dist/purify.min.js",
        "LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0XUx12aS2UaRkTnfVPNOv9vw==",
        "f69a46022ab1f53e969c8ebbca98172c8995785a9b3be72ea4a12d25b1a1bf67",
    ),
)
AXE = Library(
    "axe-core",
    "4.14.1",
    "axe.min.js",
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
)


def main() -> int:
    """Write the files, or compare them. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing into the page; fail if a file differs")
    parser.add_argument("--axe", type=Path, metavar="FOLDER", help="write axe-core into a folder")
    args = parser.parse_args()
    wrong = False
    for library in PAGES:
        target, published = PAGE / Path(library.file).name, fetched(library)
        if not args.check:
            target.write_bytes(published)
        elif not target.is_file() or target.read_bytes() != published:
            print(f"{target.relative_to(ROOT)}: is not {library.file} of {library.name} {library.version}")
            wrong = True
    if args.axe:
        args.axe.mkdir(parents=True, exist_ok=True)
        (args.axe / AXE.file).write_bytes(fetched(AXE))
    return int(wrong)


def fetched(library: Library) -> bytes:
    """Return the published bytes of a library's file. Exit if the package or the file is not the one of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, f"{library.name}@{library.version}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(folder).glob("*.tgz")
        sha = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if sha != library.package_sha512:
            sys.exit(f"{library.name} {library.version}: the package's sha512 is {sha}, not {library.package_sha512}")
        with tarfile.open(package) as archive:
            member = archive.extractfile(f"package/{library.file}")
            assert member is not None
            content = member.read()
    if (digest := hashlib.sha256(content).hexdigest()) != library.sha256:
        sys.exit(f"{library.name} {library.version}: sha256 of {library.file} is {digest}, not {library.sha256}")
    return content


if __name__ == "__main__":
    sys.exit(main())
