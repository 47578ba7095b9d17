"""What fetching a checkpoint costs, by the code of this folder and by other code: from a hub, to the plan's hashes.

    python benchmarks/fetch.py --against FOLDER_OF_ANOTHER_CHECKOUT
    python benchmarks/fetch.py --against FOLDER_OF_ANOTHER_CHECKOUT --files 4 --megabytes 1000 --rate 20

The tests' hub, on this machine, serves random weights, each answer at `--rate` megabytes a second at most (0: as fast
as it goes). Both ways take turns, each with an empty cache. A run fetches the checkpoint into a build, and hashes its
files and tensors as the split step does. Printed are the medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests"))

import torch  # noqa: E402
from checkpoint.hub_server import COMMIT, REPO, Hub, running  # noqa: E402
from safetensors.torch import save  # noqa: E402

TENSORS = 8  # of a file
RUN = """
import sys, time, resource
from pathlib import Path
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.fetch import fetch
from shardmill.checkpoint.hashing import scan_checkpoint
from shardmill.checkpoint.headers import read_tensors
build, began = Path(sys.argv[1]), time.perf_counter()
cache = HashCache(build / "hashes.sqlite")
fetch(path=None, repo=sys.argv[2], revision=sys.argv[3], dest=build / "source", cache=cache)
fetched = time.perf_counter()
scan_checkpoint(build / "source", read_tensors(build / "source"), cache)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(fetched - began, time.perf_counter() - fetched, usage.ru_utime + usage.ru_stime)
"""


def checkpoint(files: int, megabytes: int) -> dict[str, bytes]:
    """Return a checkpoint's files: some of weights, of random bits that are finite numbers."""
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    made: dict[str, bytes] = {"config.json": b"{}", "tokenizer.json": b"{}"}
    where = {}
    for i, name in enumerate(names):
        count = megabytes * 500_000 // TENSORS
        tensors = {f"t{i}.{j}": torch.rand(count).to(torch.bfloat16) for j in range(TENSORS)}
        made[name] = save(tensors)
        where |= dict.fromkeys(tensors, name)
    made["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": where}).encode()
    return made


def run(code: Path, hub: Hub, scratch: Path) -> tuple[float, float, float]:
    """Return the seconds that a fetch took, those of the hashes after it, and those of CPU."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    paths = os.pathsep.join([str(code), str(code / "portable")])
    environment = os.environ | {"PYTHONPATH": paths, "HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(folder / "hub")}
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    command = [sys.executable, "-c", RUN, str(folder), REPO, COMMIT]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    shutil.rmtree(folder)
    fetched, hashed, cpu = map(float, done.stdout.split())
    return fetched, hashed, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="a checkout with other code")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=300, help="of each file")
    parser.add_argument("--rate", type=float, default=0, help="megabytes a second of each answer")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    ways = {"other code": given.against.resolve(), "this code": HERE}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    with running(checkpoint(given.files, given.megabytes)) as hub:
        if given.rate:
            hub.rates = {name: given.rate * 1e6 for name in hub.files if name.endswith(".safetensors")}
        for _ in range(given.times):
            for name, code in ways.items():
                found[name].append(run(code, hub, given.scratch))
                time.sleep(1)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    size = given.files * given.megabytes / 1000
    print(f"{given.files} files of {size:.1f} GB together, {given.rate or 'any number of'} MB/s a stream")
    for name, (fetched, hashed, cpu) in medians.items():
        print(f"{name}: fetch {fetched:.1f} s, hashes of the plan {hashed:.1f} s, {cpu:.1f} s of CPU")
    old, new = (sum(medians[name][:2]) for name in ways)
    print(f"together {old:.1f} s and {new:.1f} s: {old / new:.2f} times as fast")


if __name__ == "__main__":
    main()
