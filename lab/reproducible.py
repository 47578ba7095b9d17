"""Builds a config twice under conditions that must not matter, and compares what came out, byte for byte.

    python lab/reproducible.py configs/demo.yaml
    python lab/reproducible.py configs/phi-4-mini-synthetic.yaml --scratch /somewhere/with/15GB

The builds differ in their folder, PYTHONHASHSEED, number of cores, locale and time zone. Of the first only hashes are
kept when the second begins. Logs, times (benchmark/) and the page that shows them are not compared. Exit code 1 if a
file differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardmill import config
from shardmill.checkpoint.hashing import hash_files

ROOT = Path(__file__).parents[1]
LINKED = ("checkpoints", "configs", "resources")
VARYING = ("logs", "benchmark", "report.html", ".snakemake_timestamp")


@dataclass(frozen=True)
class Conditions:
    """What differs between the builds."""

    folder: str
    cores: int
    hash_seed: str
    locale: str
    zone: str


BUILDS = (Conditions("one", 4, "1", "C", "UTC"), Conditions("two/levels", 1, "4242", "de_DE.UTF-8", "Asia/Tokyo"))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--scratch", type=Path, help="where to build; on the checkpoint's disk no weight is copied")
    parser.add_argument("--targets", nargs="+", default=["all"], help="files to build instead, without build/MODEL/")
    args = parser.parse_args()
    model = config.load(args.config, ROOT).model
    targets = args.targets if args.targets == ["all"] else [f"build/{model}/{target}" for target in args.targets]
    files = []
    for conditions in BUILDS:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            folder = Path(scratch) / conditions.folder
            build(folder, args.config.resolve(), targets, conditions)
            files.append(hashes(folder / "build" / model))
    differing = sorted(name for name in files[0].keys() | files[1].keys() if files[0].get(name) != files[1].get(name))
    print(*(f"differs: {name}" for name in differing), sep="\n", end="\n" if differing else "")
    print(f"{len(files[0])} files of {model} compared, {len(differing)} differ")
    sys.exit(bool(differing))


def build(folder: Path, config_file: Path, targets: list[str], conditions: Conditions) -> None:
    """Run the workflow in a folder that has nothing yet."""
    folder.mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder]
    command += [*targets, "--cores", conditions.cores, "--configfile", config_file]
    varied = {"PYTHONHASHSEED": conditions.hash_seed, "LC_ALL": conditions.locale, "TZ": conditions.zone}
    log = folder / "snakemake.log"
    with log.open("wb") as stream:
        done = subprocess.run([*map(str, command)], env=os.environ | varied, stdout=stream, stderr=stream, check=False)
    if done.returncode:
        sys.exit(f"the build in {folder.name} failed:\n{log.read_text()[-3000:]}")


def hashes(build: Path) -> dict[str, str]:
    """Return sha256 of every file that must not vary, by its path in the build."""
    files = [path for path in build.rglob("*") if path.is_file() and not set(path.parts) & set(VARYING)]
    return {path.relative_to(build).as_posix(): sha for path, sha in hash_files(files).items()}


if __name__ == "__main__":
    main()
