"""`portable-coreml ...`: the command line. Each command prints what one function of the library returns.

Exit codes: 0; 1 with one line on stderr for a model or an input that is refused, and for `lint` if it finds an error; 2
for a wrong command line.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from portable_coreml import __version__
from portable_coreml.errors import InputError, PortableError
from portable_coreml.files.bundle import compile_model
from portable_coreml.files.compare import Contents, read_contents
from portable_coreml.files.model import read_bytes
from portable_coreml.judge.limits import asked_for
from portable_coreml.judge.lint import lint
from portable_coreml.judge.placement import judge_package
from portable_coreml.judge.rule import Target
from portable_coreml.proxy import MLModelProxy, set_precision
from portable_coreml.run.ane import options_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)  # on import it lists what it lacks without Core ML
    options = _parser().parse_args(arguments)
    try:
        return int(options.action(options))
    except (PortableError, OSError) as error:
        print(f"portable-coreml: {_line(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="portable-coreml", description="Core ML programs without a Mac.")
    parser.add_argument("--version", action="version", version=f"portable-coreml {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(action: Any, description: str, *paths: str) -> argparse.ArgumentParser:
        command = commands.add_parser(action.__name__.strip("_"), help=description, description=description)
        command.set_defaults(action=action)
        for path in paths:
            command.add_argument(path, type=Path)
        return command

    run = add(_run, "Predict once, from zero states, and print what comes out.", "model", "inputs")
    run.add_argument("--out", type=Path, help="write the output arrays to this .npz file")
    run.add_argument("--function", default="", help="the function to run; the model's default if left out")
    run.add_argument(
        "--precision",
        type=_precision,
        default="fp32",
        metavar="{fp32,fp16,ane[:OPTION,...]}",
        help="fp16 rounds every fp16 result; ane also computes as the Neural Engine is reported to",
    )
    add(_compile, "Compile a package to a bundle, .mlmodelc.", "package", "bundle")
    as_json = [add(_inspect, "Show inputs, outputs, states, operations and weights of a package.", "model")]
    for judge, what in (
        (_lint, "List what keeps operations off the Neural Engine."),
        (_residency, "Predict, as JSON, where each operation can run."),
    ):
        command = add(judge, f"{what} Nothing is measured.", "model")
        command.add_argument("--chip", type=int, default=4, help="generation of the M-series chip; 4")
        command.add_argument("--ios", action="store_true", help="judge for every iOS that is known")
        command.add_argument(
            "--system", action="append", default=[], help="judge for this system, such as 'macOS 27'; may be repeated"
        )
        as_json += [command] if judge is _lint else []
    for command in as_json:
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _precision(text: str) -> str:
    try:
        options_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _run(options: argparse.Namespace) -> int:
    set_precision(options.precision)
    inputs = _arrays(options.inputs)
    results = MLModelProxy(str(options.model), function_name=options.function).predict(inputs)
    for name, value in results.items():
        print(f"{name}: {f'{value.dtype} {list(value.shape)}' if isinstance(value, np.ndarray) else value}")
    if options.out is not None:
        arrays: dict[str, Any] = {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
        with options.out.open("wb") as file:
            np.savez(file, **arrays)
    return 0


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file. Raises InputError for another file; pickled objects in it are not loaded."""
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not an .npz file of arrays: {error}") from error


def _compile(options: argparse.Namespace) -> int:
    if options.bundle.exists():
        raise PortableError(f"{options.bundle}: exists already; remove it, or name another place")
    options.bundle.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.bundle.parent, prefix=f".{options.bundle.name}.") as folder:
        compile_model(options.package, Path(folder) / "bundle").rename(options.bundle)  # whole, or not there
    return 0


def _inspect(options: argparse.Namespace) -> int:
    contents = read_contents(options.model)
    print(json.dumps(asdict(contents), indent=2) if options.json else "\n".join(map(_printable, _described(contents))))
    return 0


def _described(contents: Contents) -> Sequence[str]:
    lines = [f"{contents.path}: ML Program, specification {contents.specification}, {contents.bytes} bytes"]
    for function in contents.functions:
        lines.append(f"function {function.name} ({function.opset})")
        groups = (("input", function.inputs), ("output", function.outputs), ("state", function.states))
        lines += [f"  {kind} {item.name}: {item.dtype} {item.shape}" for kind, items in groups for item in items]
        lines += [f"  {count} x {kind}" for kind, count in function.operations]
    return lines + [f"weights: {row.tensors} of {row.dtype}, {row.bytes} bytes" for row in contents.weights]


def _line(said: object) -> str:
    """Return all that is said, in one line."""
    return _printable(" ".join(str(said).split()))


def _printable(text: str) -> str:
    """Return text from a model's author with every unprintable character replaced, so that no terminal obeys it."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _target(options: argparse.Namespace) -> Target:
    return Target(options.chip, asked_for(options.system, options.ios))


def _lint(options: argparse.Namespace) -> int:
    rows = lint(options.model, _target(options))
    errors = sum(row.severity == "error" for row in rows)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return int(errors > 0)
    for row in rows:
        print(_line(f"{row.severity}: {row.rule}: {row.function}: {row.operation}: {row.why}; {row.remedy}"))
    print(f"{options.model}: {errors} errors, {len(rows) - errors} remarks, all predicted")
    return int(errors > 0)


def _residency(options: argparse.Namespace) -> int:
    verdicts = judge_package(options.model, _target(options))
    print(json.dumps({"evidence": "predicted", "rows": [asdict(row) for row in verdicts.rows]}, indent=2))
    return 0
