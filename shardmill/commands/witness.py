"""`shardmill witness`: a build's parts on Apple's Core AI runtime, against transformers and the portable engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardmill.plan import Part


def witness(
    build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")],
    parts: Annotated[list[str] | None, typer.Argument(help="Names of parts; all of them if left out.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the verdicts are written; by default beside the build.")
    ] = None,
) -> None:
    """Compute each part on Apple's Core AI runtime, with the weights that its package stores, and compare.

    Every part is run at every width of a pass, in mixtures of widths and with rejected drafts. Exit code 1 if a
    number misses its limit.
    """
    from shardmill.errors import GateError, ShardmillError
    from shardmill.files import dumps, read_json
    from shardmill.gates.measurement import demand
    from shardmill.machine import engine
    from shardmill.plan import load_part
    from shardmill.quiet import quiet_coremltools, quiet_transformers
    from shardmill.witness import installed

    runtime = installed.runtime()
    if not (build / "plan.json").is_file():
        raise ShardmillError(f"{build}: contains no plan.json; name a model's build folder")
    plan = read_json(build / "plan.json")
    names = [row["name"] for row in plan["parts"] if row["name"] != "embedding"]
    if unknown := sorted(set(parts or ()) - set(names)):
        raise ShardmillError(f"{build} has no part {unknown[0]}; its parts are {', '.join(names)}")
    file = output or build.resolve().parent / f"{build.resolve().name}.witness.json"
    verdicts: dict[str, Any] = {}
    with quiet_coremltools(), quiet_transformers():
        for name in parts or names:
            verdicts[name] = _verdict(build, load_part(build / f"parts/{name}.json"), plan, engine(), runtime)
            print(_line(verdicts[name]), flush=True)
            file.write_text(dumps(verdicts), encoding="utf-8")
    rows = [row for one in verdicts.values() for row in one["gate"]]
    worst = max((one for one in verdicts.values() if one["gate"]), key=_error)
    print(f"furthest from transformers: {worst['part']}, {_error(worst):.1e}; {file}")
    try:
        demand("witness", rows)
    except GateError as error:
        sys.exit(f"shardmill: {error}")


def _verdict(
    build: Path, part: Part, plan: Mapping[str, Any], engine: Mapping[str, str], runtime: Mapping[str, str]
) -> dict[str, Any]:
    """Return a part's verdict, with the seconds and the memory that it took."""
    from safetensors.torch import load_file

    from shardmill.errors import ShardmillError
    from shardmill.gates.weights import PackageWeights
    from shardmill.pipeline.task import source_folder
    from shardmill.witness.part import Stopwatch, measure, verdict

    package, bundle = build / f"packages/{part.name}.mlpackage", build / f"compiled/{part.name}.mlmodelc"
    source, states = source_folder(build / "source.receipt.json"), build / "reference.safetensors"
    if gone := [path for path in (package, bundle, states, source / "config.json") if not path.exists()]:
        raise ShardmillError(f"{gone[0]}: is not there; the witness needs a build folder as the pipeline made it")
    watch = Stopwatch()
    stored = PackageWeights(package, part, plan["prefix"])
    found = measure(part, bundle, plan, load_file(states), source, stored)
    return verdict(part.name, engine, runtime, found) | {"cost": watch.cost()}


def _line(one: Mapping[str, Any]) -> str:
    """Return a part's numbers in one line: the worst of each measurement, seconds and memory."""
    worst: dict[str, float] = {}
    for row in one["gate"]:
        worst[row["name"]] = max(worst.get(row["name"], 0.0), row["value"])
    numbers = ", ".join(f"{name.removeprefix('witness_')} {value:.1e}" for name, value in worst.items())
    return f"{one['part']}: {numbers}; {one['cost']['seconds']:g} s, at most {one['cost']['peak_mb']} MB"


def _error(one: Mapping[str, Any]) -> float:
    """Return how far a part is from transformers."""
    return max(float(row["value"]) for row in one["gate"] if row["name"] == "witness_error")
