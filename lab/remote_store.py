"""What a remote store saves and costs: a build from a warm one, and an entry against a plain download of its files.

    pip install -c constraints.txt -e '.[test]'
    python lab/remote_store.py configs/demo.yaml
    python lab/remote_store.py configs/demo.yaml --megabytes 2000 --scratch /somewhere/with/10GB

moto's server, on this machine, stands for S3. A first folder builds with an empty store, a second one with what the
first has sent; no step may work there and both must hold the same files, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec

from shardmill import config
from shardmill.checkpoint.hashing import hash_files
from shardmill.files import digest
from shardmill.pipeline.cache.remote import URL, Remote
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action

ROOT = Path(__file__).parents[1]
LINKED = ("checkpoints", "configs", "resources")
LOCAL = ("logs", ".snakemake_timestamp")
FILE = 100  # MB
PORT = 5055
BUCKET = "models"
S3 = {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
    "AWS_ACCESS_KEY_ID": "anybody",
    "AWS_SECRET_ACCESS_KEY": "anything",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--megabytes", type=int, default=500, help="of the entry that is compared with a download")
    parser.add_argument("--scratch", type=Path, help="where to build")
    parser.add_argument("--targets", nargs="+", default=["all"], help="files to build instead, without build/MODEL/")
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args()
    os.environ |= S3
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        files = bucket()
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            one_entry(files, Path(scratch), args.megabytes)
            whole_builds(files, Path(scratch), args)
    finally:
        server.terminate()
        server.wait()


def bucket() -> fsspec.AbstractFileSystem:
    """Return the file system, once the server answers."""
    files = fsspec.filesystem("s3", use_listings_cache=False)
    for _ in range(50):
        try:
            files.mkdir(BUCKET)
            return files
        except OSError:
            time.sleep(0.2)
    sys.exit("moto's server does not start")


def one_entry(files: fsspec.AbstractFileSystem, scratch: Path, megabytes: int) -> None:
    """Compare an entry with its files by fsspec alone."""
    shared, action = Remote(f"s3://{BUCKET}/entry"), Action("benchmark")

    def write(made: dict[str, Path]) -> None:
        made["package"].mkdir()
        for begin in range(0, megabytes, FILE):
            with (made["package"] / f"weight_{begin}.bin").open("wb") as stream:
                for _ in range(min(FILE, megabytes - begin)):
                    stream.write(os.urandom(1_000_000))

    for name in ("first", "second"):
        build = scratch / name
        store = Store(build / "store", shared=shared)
        began = time.perf_counter()
        worked = store.perform(action, {"package": build / "a.mlpackage"}, build / "a.receipt.json", write)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
    plain = download(files, f"{BUCKET}/entry", scratch)
    print(
        f"an entry of {megabytes} MB: {seconds:.1f} s, checked and in place; "
        f"plain download {plain:.1f} s; {seconds / plain:.2f} times"
    )
    if worked:
        sys.exit("the entry was made again")


def whole_builds(files: fsspec.AbstractFileSystem, scratch: Path, args: argparse.Namespace) -> None:
    """Time a build that fills the store, and one that takes from it."""
    settings = config.load(args.config, ROOT)
    targets = args.targets if args.targets == ["all"] else [f"build/{settings.model}/{name}" for name in args.targets]
    by_build = {}
    for name in ("cold", "warm"):
        folder = scratch / name
        began = time.perf_counter()
        build(folder, args.config.resolve(), targets, args.cores)
        seconds = time.perf_counter() - began
        logs = [log.read_text() for log in (folder / "build" / settings.model / "logs").glob("*.log")]
        worked, taken = (sum(word in log for log in logs) for word in ("INFO worked:", "taken from the remote store"))
        print(f"{name}: {seconds:.0f} s, {len(logs)} jobs: {worked} worked, {taken} taken from the remote store")
        by_build[name] = hashes(folder / "build" / settings.model)
    print(f"a plain download of the store: {download(files, f'{BUCKET}/builds', scratch):.1f} s")
    print(f"{len(by_build['cold'])} files compared, {len(by_build['cold'].items() ^ by_build['warm'].items())} differ")
    sys.exit(bool(worked or by_build["cold"] != by_build["warm"]))


def download(files: fsspec.AbstractFileSystem, folder: str, scratch: Path) -> float:
    """Return seconds that fsspec alone takes for everything in a folder of the bucket."""
    objects = files.find(folder)
    began = time.perf_counter()
    files.get(objects, [str(scratch / "plain" / digest(path)) for path in objects])
    seconds = time.perf_counter() - began
    print(f"{folder}: {len(objects)} objects, {sum(map(files.size, objects)) / 1e6:.0f} MB")
    shutil.rmtree(scratch / "plain")
    return seconds


def build(folder: Path, config_file: Path, targets: list[str], cores: int) -> None:
    """Run the workflow in a folder that has nothing yet."""
    folder.mkdir(parents=True)
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder]
    command += [*targets, "--cores", cores, "--configfile", config_file]
    log = folder / "snakemake.log"
    with log.open("wb") as stream:
        environment = os.environ | {URL: f"s3://{BUCKET}/builds"}
        done = subprocess.run([*map(str, command)], env=environment, stdout=stream, stderr=stream, check=False)
    if done.returncode:
        sys.exit(f"the build in {folder.name} failed:\n{log.read_text()[-3000:]}")


def hashes(build: Path) -> dict[str, str]:
    """Return sha256 of every file of a build, by its path."""
    files = [path for path in build.rglob("*") if path.is_file() and not set(path.parts) & set(LOCAL)]
    return {path.relative_to(build).as_posix(): sha for path, sha in hash_files(files).items()}


if __name__ == "__main__":
    main()
