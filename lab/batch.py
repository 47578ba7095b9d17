"""Many models in one run of Snakemake: how long planning, building and a run with nothing to do take.

    python lab/batch.py 10
    python lab/batch.py 100 --copies
    python lab/batch.py 100 --like configs/demo.yaml

The models are tiny, with seeded random weights, and of one more the weights are cut short. `--different` says how many
checkpoints there are: models that share one share what is made of it. With `--copies` only the first and the broken one
are built; the others' folders are copies, of which Snakemake is told by --touch. That is enough to measure a run with
nothing to do. With `--like`, models of that config under other names are planned, twice, and none is built. Exit code 1
if not exactly the broken model is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from shardmill_lab.synthetic import write_synthetic_checkpoint

from shardmill.files import load_json

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "resources/demo"
BROKEN = "broken"


@dataclass(frozen=True)
class Run:
    """One run of Snakemake: seconds on the clock and of CPU, and most MB that one process of it held."""

    clock: float
    cpu: float
    memory: float
    code: int

    def __str__(self) -> str:
        return f"{self.clock:.1f} s ({self.cpu:.1f} s of CPU), {self.memory:.0f} MB"


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=int)
    parser.add_argument("--different", type=int, default=1, help="checkpoints")
    parser.add_argument("--copies", action="store_true", help="build one model, copy the others")
    parser.add_argument("--like", type=Path, help="a config; only plan")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="where to build")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        home = Path(scratch)
        if args.like:
            write_alike(home, args.models, args.like)
            for _ in range(2):
                print(f"planning: {snakemake(home, ['all', '-n', '-q'], args.cores)}")
            return
        names = write_models(home, args.models, args.different)
        print(f"{args.models} models of {args.different} checkpoints, and a broken one")
        print(f"planning: {snakemake(home, ['all', '-n', '-q'], args.cores)}")
        pages = {name: f"build/{name}/report.html" for name in names}
        built = snakemake(home, [pages[names[0]], pages[BROKEN]] if args.copies else ["all"], args.cores)
        print(f"building: {built.clock:.0f} s")
        logs = [log.read_text() for log in (home / "build").glob("*/logs/*.log")]
        worked, unchanged = (sum(word in log for log in logs) for word in ("INFO worked:", "INFO unchanged"))
        print(f"{worked} results were made, {unchanged} were there already")
        good = [page for name, page in pages.items() if name != BROKEN]
        if args.copies:
            for name in names[1:-1]:
                shutil.copytree(home / "build" / names[0], home / "build" / name, symlinks=True)
            snakemake(home, [*good, "--touch", "-q"], args.cores)
        print(f"nothing to do: {snakemake(home, [*good, '-q'], args.cores)}")
        said = (home / "run.log").read_text().splitlines()
        print(*(line for line in said if line.startswith("shardmill: ")), said[-1], sep="\n")
        missing = [name for name, page in pages.items() if not (home / page).exists()]
        print(f"{len(names) - len(missing)} reports; missing: {', '.join(missing)}")
        sys.exit(missing != [BROKEN] or built.code == 0)


def write_models(home: Path, count: int, different: int) -> list[str]:
    """Return the checkpoints, a config for each model and the batch; the models' names."""
    shapes = load_json(DEMO / "config.json") | {"num_hidden_layers": 1}
    folders = [f"checkpoints/{seed}" for seed in range(different)] + [f"checkpoints/{BROKEN}"]
    for seed, folder in enumerate(folders):
        (home / folder).parent.mkdir(exist_ok=True)
        write_synthetic_checkpoint(shapes, home / folder, seed, tokenizer=DEMO)
    (cut,) = (home / folders[-1]).glob("*.safetensors")
    os.truncate(cut, cut.stat().st_size // 2)
    models = {f"tiny-{number:03d}": folders[number % different] for number in range(count)} | {BROKEN: folders[-1]}
    (home / "models").mkdir()
    for name, folder in models.items():
        config = {
            "model": name,
            "source": {"path": folder},
            "context": 64,
            "topology": [[0, 1]],
            "head": {"slices": 1},
            "convert": {"precision": "fp16"},
            "parity": {"positions": 8, "perplexity_positions": 8},
            "benchmark": {"prompt_tokens": [8], "tasks": [], "new_tokens": 8, "repetitions": 1, "drafters": ["none"]},
        }
        (home / f"models/{name}.yaml").write_text(yaml.safe_dump(config))
    write_batch(home)
    return list(models)


def write_alike(home: Path, count: int, like: Path) -> None:
    """Write a config under several names, and the batch that lists them."""
    (home / "models").mkdir()
    content = yaml.safe_load(like.read_text())
    for number in range(count):
        (home / f"models/{number:03d}.yaml").write_text(yaml.safe_dump(content | {"model": f"model-{number:03d}"}))
    write_batch(home)


def write_batch(home: Path) -> None:
    """Write the config that lists the others."""
    (home / "batch.yaml").write_text("batch: [models/*.yaml]\n")


def snakemake(home: Path, words: list[str], cores: int) -> Run:
    """Run the workflow in the folder; what it says goes to run.log."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", home]
    command += [*words, "--cores", cores, "--configfile", home / "batch.yaml"]
    began = time.perf_counter()
    with (home / "run.log").open("ab") as log:
        process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1e6 if sys.platform == "darwin" else 1e3
    clock = time.perf_counter() - began
    return Run(clock, used.ru_utime + used.ru_stime, used.ru_maxrss / unit, process.returncode)


if __name__ == "__main__":
    main()
