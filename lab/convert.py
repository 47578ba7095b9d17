"""Compare stamping with coremltools alone, and the conversion of a whole model with copying the same bytes.

    shardmill synth-checkpoint --like configs/phi-4-mini.yaml checkpoints/phi-4-mini-synthetic    # 7.7 GB, once
    python lab/convert.py checkpoints/phi-4-mini-synthetic --scratch /somewhere/with/30GB --json results.json

`--only whole` is for a checkpoint of any family; the other comparisons want 32 layers of one kind.

Every conversion runs in a separate process, so that time includes imports, and memory is the process's peak. The two
ways take turns on the same machine. The packages are compared byte for byte, and all files are removed at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardmill import plan
from shardmill.checkpoint.hashing import hash_files, scan_checkpoint, tree_hash
from shardmill.checkpoint.headers import read_tensors
from shardmill.config import parse
from shardmill.imports import spare_imports
from shardmill.machine import collect_rarely
from shardmill.models import family
from shardmill.models.architecture import prefix_of
from shardmill.models.hf_config import load_hf_config
from shardmill.plan import Part
from shardmill.topology import resolve_topology

SLOTS = 2048
METHODS = ("plain", "stamped")
COMPARED = ((30, 32), (20, 24))
GROWTH = (8, 32, 64)
MB = 1_000_000
MEASURES = ("seconds", "cpu_seconds", "peak_mb")


@dataclass(frozen=True)
class Run:
    """One process."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_mb: float


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--scratch", type=Path, help="where to write; on the checkpoint's disk to compare with cp")
    parser.add_argument("--only", choices=("parts", "growth", "whole"), action="append")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    chosen = args.only or ["parts", "growth", "whole"]
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        bench = Bench(args.checkpoint.resolve(), Path(folder))
        measure: dict[str, Callable[[], Any]] = {"parts": bench.parts, "growth": bench.growth, "whole": bench.whole}
        figures = {"machine": machine()} | {name: measure[name]() for name in chosen}
    if "parts" in figures and "growth" in figures:
        figures["per_layer"] = per_layer(figures["parts"], figures["growth"])
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


class Bench:
    """The measurements on one checkpoint."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        hf = load_hf_config(source)
        model = family(hf.model_type).describe(hf, SLOTS)
        self.tensors = read_tensors(source)
        self.model = model.under(prefix_of(self.tensors, model.prefix))
        settings = {"model": "benchmark", "source": {"path": str(source)}, "context": SLOTS, "topology": "auto"}
        self.settings = resolve_topology(parse(settings | {"head": {"slices": "auto"}}), self.model.architecture)

    def layers(self, start: int, end: int) -> Part:
        """Return layers [start, end); layers past the checkpoint's last repeat the weights of its first layers."""
        a = self.model.architecture
        rounds = -(-end // a.layers)
        again = {
            f"layers.{int(path.split('.')[1]) + a.layers * i}.{path.split('.', 2)[2]}": source
            for path, source in self.model.sources.items()
            if path.startswith("layers.")
            for i in range(rounds)
        }
        longer = replace(
            self.model,
            architecture=replace(a, kinds=a.kinds * rounds),
            sources={**self.model.sources, **again},
        )
        part, *_ = plan.draft_parts(replace(self.settings, topology=((start, end),)), longer, self.tensors)
        return part

    def all_parts(self) -> tuple[Part, ...]:
        """Return the model's parts, cut as `topology: auto` cuts it, the embedding last."""
        return plan.draft_parts(self.settings, self.model, self.tensors)

    def run(self, method: str, part: Part, templates: str = "templates", threads: int = 4) -> Run:
        """Convert a part in a process of its own; the package stays at `output`."""
        file = self.folder / f"{part.name}.json"
        plan.write_part(file, part)
        words = [method, file, self.source, self.output(method, part), self.folder / templates, threads]
        log = self.folder / f"{method}_{part.name}.log"
        with log.open("wb") as stream:
            began = time.perf_counter()
            process = subprocess.Popen([sys.executable, __file__, "--worker", *map(str, words)], stderr=stream)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{method} {part.name} failed:\n{log.read_text()[-2000:]}")
        unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
        return Run(f"{method} {part.name}", seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / MB)

    def output(self, method: str, part: Part) -> Path:
        return self.folder / f"{method}_{part.name}.mlpackage"

    def parts(self) -> list[dict[str, Any]]:
        """Measure plain and stamped on equal parts, in turns; stamped also without an earlier template."""
        rows: list[dict[str, Any]] = []
        for start, end in COMPARED:
            part = self.layers(start, end)
            templates = f"templates_{start}"  # made by the cold run, used by the next
            cold = self.run("stamped", part, templates)
            shutil.rmtree(self.output("stamped", part))
            runs = {"cold": cold, "plain": self.run("plain", part), "stamped": self.run("stamped", part, templates)}
            row = {"layers": [start, end], "identical": self.identical(part)}
            rows.append(row | {name: asdict(run) for name, run in runs.items()})
            for method in METHODS:
                shutil.rmtree(self.output(method, part))
        return rows

    def identical(self, part: Part) -> dict[str, bool]:
        """Return what is the same in the packages of both methods.

        Predictions of the first of the compared parts only.
        """
        trace, stamped = (self.output(method, part) for method in METHODS)
        same = {"bytes": tree_hash(trace) == tree_hash(stamped)}  # so operations and weights too
        if (part.start, part.end) == COMPARED[0]:
            for method in METHODS:
                self.run(f"predict_{method}", part)
            answers = [(self.folder / f"predict_{method}_{part.name}.json").read_text() for method in METHODS]
            same["predictions"] = answers[0] == answers[1]
        return same

    def growth(self) -> list[dict[str, Any]]:
        """Measure the peak memory of one process for more and more layers."""
        rows = []
        for count in (2, *GROWTH):  # the first makes the template
            part = self.layers(0, count)
            rows.append({"layers": count} | asdict(self.run("stamped", part)))
            shutil.rmtree(self.output("stamped", part))
        return rows[1:]

    def whole(self) -> dict[str, Any]:
        """Convert every part and the table, from no template to hashed packages, against cp of the same bytes."""
        *others, embedding = self.all_parts()
        jobs = [embedding, *others]  # the pipeline begins with the embedding too
        began = time.perf_counter()
        scan_checkpoint(self.source, {t.label: t.info for part in jobs for t in part.tensors})
        hashed = time.perf_counter() - began
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            runs = list(pool.map(self.hashed, jobs))
        ours = time.perf_counter() - began
        files = [*self.source.glob("*.safetensors"), *(self.output("stamped", part) for part in jobs)]
        size = sum(f.stat().st_size for path in files for f in ([path] if path.is_file() else path.rglob("*")))
        copied = self.copy(files)
        figures = {"bytes": size, "hash_source_seconds": hashed, "seconds": ours, "cp_seconds": copied}
        return figures | {"ratio": ours / copied, "runs": [asdict(run) for run in runs]}

    def hashed(self, part: Part) -> Run:
        """Convert a part and hash the result, as one job of the pipeline does."""
        made = self.run("stamped", part, "templates_whole", threads=1)
        output = self.output("stamped", part)
        _ = tree_hash(output) if output.is_dir() else hash_files([output])
        return made

    def copy(self, files: Sequence[Path]) -> float:
        """Return seconds that cp takes."""
        target = self.folder / "copy"
        target.mkdir()
        began = time.perf_counter()
        subprocess.run(["cp", "-r", *map(str, files), str(target)], check=True)
        seconds = time.perf_counter() - began
        shutil.rmtree(target)
        return seconds


def per_layer(parts: Sequence[dict[str, Any]], growth: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print what one more layer takes: for plain between the parts compared, for stamped over the growth."""
    trace = [row["plain"] | {"layers": row["layers"][1] - row["layers"][0]} for row in parts]
    return {"plain": slope(trace), "stamped": slope(growth)}


def slope(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return seconds, CPU seconds and MB for each layer that the last has more than the first."""
    first, last = rows[0], rows[-1]
    layers = last["layers"] - first["layers"]
    return {key: (last[key] - first[key]) / layers for key in MEASURES}


def worker(method: str, file: Path, source: Path, output: Path, templates: Path, *, threads: int) -> None:
    """Convert as a step of the pipeline does."""
    spare_imports()
    collect_rarely()
    part = plan.load_part(file)
    if part.kind == "embedding":
        from shardmill.convert.table import write_table

        write_table(part, source, output, threads)
    elif method.startswith("predict_"):
        predict(part, output.with_name(output.name.removeprefix("predict_")), output.with_suffix(".json"))
    elif method == "stamped":
        from shardmill.convert.stamped import convert_stamped

        convert_stamped(part, source, "int8", output, templates, threads)
    else:
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from oracle import convert_plain

        convert_plain(part, source, "int8", output)


def predict(part: Part, path: Path, answers: Path) -> None:
    """Write the sha256 of everything that a package predicts, at T = 1 and at the upper bound after it."""
    import coremltools as ct
    import numpy as np

    from shardmill import machine as host_machine
    from shardmill.convert.trace import sized
    from shardmill.models.part_kinds import inputs

    with host_machine.load_programs_as("fp16"):
        model = ct.models.MLModel(str(path))
    random, state, digests = np.random.default_rng(0), model.make_state(), []
    for tokens in (1, part.spec.tokens):
        shapes = {name: sized(shape, tokens) for name, shape in inputs(part.spec).items()}
        arrays = {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
        result = model.predict(arrays, state)
        if not all(np.isfinite(values).all() for values in result.values()):
            sys.exit("a prediction that is not finite compares nothing")
        digests += [hashlib.sha256(result[name].tobytes()).hexdigest() for name in sorted(result)]
    answers.write_text(json.dumps(digests))


def machine() -> dict[str, Any]:
    """Return where and with what it was measured."""
    packages = {name: version(name) for name in ("coremltools", "torch", "numpy", "protobuf")}
    load = os.getloadavg()[0]
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "load": load,
        "python": platform.python_version(),
    } | packages


def show(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    console = Console()
    console.print(" ".join(f"{key}={value}" for key, value in figures["machine"].items()))
    if "parts" in figures:
        print_parts(console, figures)
    rows = [*figures.get("growth", []), *figures.get("whole", {}).get("runs", [])]
    if rows:
        table = Table("process", "s", "CPU s", "peak MB")
        for row in rows:
            table.add_row(row["name"], *(f"{row[key]:.1f}" for key in MEASURES))
        console.print(table)
    if whole := figures.get("whole"):
        console.print(
            f"whole model: {whole['seconds']:.1f} s ({whole['hash_source_seconds']:.1f} s of it hashing the source), "
            f"cp of the same {whole['bytes'] / 1e9:.1f} GB: {whole['cp_seconds']:.1f} s, ratio {whole['ratio']:.2f}"
        )


def print_parts(console: Console, figures: dict[str, Any]) -> None:
    """Print the comparison with coremltools alone."""
    table = Table("layers", "", "plain", "stamped", "stamped, no template", "plain / stamped")
    for row in figures["parts"]:
        for key in MEASURES:
            trace, stamped, cold = (row[method][key] for method in ("plain", "stamped", "cold"))
            numbers = (f"{number:.2f}" for number in (trace, stamped, cold, trace / stamped))
            table.add_row(str(row["layers"]), key, *numbers)
    for key in MEASURES if "per_layer" in figures else ():
        trace, stamped = (figures["per_layer"][method][key] for method in ("plain", "stamped"))
        table.add_row("per layer", key, f"{trace:.2f}", f"{stamped:.2f}", "", f"{trace / stamped:.1f}")
    console.print(table)
    console.print(f"packages identical: {[row['identical'] for row in figures['parts']]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        method, *paths, threads = sys.argv[2:]
        worker(method, *map(Path, paths), threads=int(threads))
    else:
        main()
