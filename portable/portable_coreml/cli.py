"""`portable-coreml ...`: the command line. Each command prints what one function of the library returns.

Exit codes: 0; 1 for what was found: an error of `judge` or `lint`, a difference; 2 for a wrong command line. What is
refused is one line on stderr, with 2 from `judge` and from commands that compare, where 1 means a finding, and with 1
from the others. 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import glob
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from portable_coreml import __version__
from portable_coreml.errors import InputError, PortableError
from portable_coreml.files.arrays import read_arrays
from portable_coreml.files.bundle import compile_model
from portable_coreml.files.compare import Contents, compare_compiled, read_contents
from portable_coreml.hook import check_coremltools
from portable_coreml.judge.asked import Asked, range_of, read_limits
from portable_coreml.judge.limits import asked_for
from portable_coreml.judge.lint import diff_residency, lint, read_report
from portable_coreml.judge.placement import judge_package
from portable_coreml.judge.report import Report, against_of, judge
from portable_coreml.judge.rule import Target
from portable_coreml.judge.shown import (
    annotations_of,
    json_of,
    json_of_against,
    markdown_of,
    printable,
    sarif_of,
    text_of,
    text_of_against,
)
from portable_coreml.proxy import MLModelProxy, set_precision
from portable_coreml.run.ane import options_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)  # on import it lists what it lacks without Core ML
    options = _parser().parse_args(arguments)
    try:
        check_coremltools()
        return int(options.action(options))
    except (PortableError, OSError) as error:
        print(f"portable-coreml: {_line(error)}", file=sys.stderr)
        return int(options.refused)
    except KeyboardInterrupt:
        print("portable-coreml: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="portable-coreml", description="Core ML programs without a Mac.")
    parser.add_argument("--version", action="version", version=f"portable-coreml {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(action: Any, description: str, *paths: str) -> argparse.ArgumentParser:
        name = action.__name__.strip("_").replace("_", "-")
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(action=action, refused=1)
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
    for action, what in (
        (_lint, "List what keeps operations off the Neural Engine."),
        (_residency, "Predict, as JSON, where each operation can run."),
    ):
        command = add(action, f"{what} Nothing is measured.", "model")
        _add_target(command)
        as_json += [command] if action is _lint else []
    comparing = [_add_judge(add(_judge, "Say what programs are, what leaves the Neural Engine, and what fp16 costs."))]
    as_json += comparing
    command = add(_diff, "Say where two programs part, operation by operation.", "model")
    command.add_argument(
        "other", type=Path, help="a package, a bundle, an exported program (.pt2), .npz or .safetensors"
    )
    _add_bounds(command)
    comparing.append(command)
    as_json.append(command)
    comparing.append(add(_compare_compiled, "Show how two compiled bundles of one package differ.", "first", "second"))
    comparing.append(
        add(_diff_residency, "Compare a predicted and a measured residency report.", "predicted", "measured")
    )
    for command in comparing:
        command.set_defaults(refused=2)
    for command in as_json:
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_judge(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument(
        "files", nargs="+", metavar="FILE", help="packages and bundles; patterns such as 'models/**/*.mlpackage'"
    )
    _add_target(command)
    _add_bounds(command)
    command.add_argument(
        "--off", type=float, help="share of arithmetic or bytes that may leave the Neural Engine; 0.05"
    )
    command.add_argument("--error", type=float, help="error of an output in fp16 that is allowed, of its size; 0.01")
    command.add_argument("--accept", action="append", metavar="RULE", help="a rule that is no error; may be repeated")
    command.add_argument("--precision", type=_precision, metavar="{fp16,ane[:OPTION,...]}", help="the arithmetic; fp16")
    command.add_argument("--rules", action="store_true", help="judge by rules alone, and run nothing")
    command.add_argument(
        "--against", type=Path, metavar="OTHER", help="compare with a program, a .pt2 or recorded arrays"
    )
    command.add_argument("--limits", type=Path, metavar="FILE", help="a TOML file with values for these options")
    command.add_argument("--sarif", type=Path, metavar="FILE", help="write the findings as SARIF 2.1.0")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary in Markdown")
    command.add_argument("--annotations", action="store_true", help="print GitHub's annotations, too")
    return command


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("--chip", type=int, help="generation of the M-series chip; 4")
    command.add_argument("--ios", action="store_true", help="judge for every iOS that is known")
    command.add_argument(
        "--system", action="append", default=[], help="judge for this system, such as 'macOS 27'; may be repeated"
    )


def _add_bounds(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--difference", type=float, help="difference of values that counts as none, of their size; 0.0001"
    )
    command.add_argument(
        "--range", type=_range, action="append", metavar="NAME=LEAST:LARGEST", help="an input's domain"
    )
    command.add_argument("--inputs", type=Path, metavar="FILE", help="arrays to feed, .npz or .safetensors")
    command.add_argument("--function", default="", help="the function; all, to compare the model's default")
    command.add_argument("--seed", type=int, default=0, help="of the inputs that are made; 0")


def _range(text: str) -> tuple[str, tuple[float, float]]:
    try:
        return range_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _precision(text: str) -> str:
    try:
        options_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _run(options: argparse.Namespace) -> int:
    set_precision(options.precision)
    inputs = read_arrays(options.inputs)
    results = MLModelProxy(str(options.model), function_name=options.function).predict(inputs)
    for name, value in results.items():
        print(f"{name}: {f'{value.dtype} {list(value.shape)}' if isinstance(value, np.ndarray) else value}")
    if options.out is not None:
        arrays: dict[str, Any] = {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
        with options.out.open("wb") as file:
            np.savez(file, **arrays)
    return 0


def _compile(options: argparse.Namespace) -> int:
    if options.bundle.exists():
        raise PortableError(f"{options.bundle}: exists already; remove it, or name another place")
    options.bundle.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.bundle.parent, prefix=f".{options.bundle.name}.") as folder:
        compile_model(options.package, Path(folder) / "bundle").rename(options.bundle)  # whole, or not there
    return 0


def _inspect(options: argparse.Namespace) -> int:
    contents = read_contents(options.model)
    print(json.dumps(asdict(contents), indent=2) if options.json else "\n".join(map(printable, _described(contents))))
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
    return printable(" ".join(str(said).split()))


def _target(options: argparse.Namespace) -> Target:
    return Target(4 if options.chip is None else options.chip, asked_for(options.system, options.ios))


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


def _judge(options: argparse.Namespace) -> int:
    asked = _asked(options)
    reports: list[Report] = []
    refused: dict[str, str] = {}
    for path in _matching(options.files):
        try:
            report = judge(path, asked)
        except (PortableError, OSError) as error:
            refused[str(path)] = _line(error)
            print(f"portable-coreml: {refused[str(path)]}", file=sys.stderr)
            continue
        reports.append(report)
        if not options.json:
            print("\n".join(map(_line_of, text_of(report))), flush=True)
        if options.annotations:
            print("\n".join(annotations_of(report)), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(json_of(reports, refused), indent=2, allow_nan=False))
    if options.sarif is not None:
        options.sarif.write_text(json.dumps(sarif_of(reports, __version__), indent=2), encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(markdown_of(reports, refused), encoding="utf-8")
    if reports and not refused:
        _check_ranges(asked, reports)
    return 2 if refused else int(any(report.errors for report in reports))


def _asked(options: argparse.Namespace) -> Asked:
    """Return what the command line and its file of limits ask for; an option on the command line counts first."""
    limits = {} if options.limits is None else read_limits(options.limits)
    named = options.system or limits.get("system", [])
    chip = limits.get("chip", 4) if options.chip is None else options.chip
    if "precision" in limits:
        try:
            options_of(limits["precision"])
        except ValueError as error:
            raise InputError(f"{options.limits}: {error}") from error
    asked = Asked(
        target=Target(chip, asked_for(named, options.ios or limits.get("ios", False))),
        ranges={**limits.get("range", {}), **dict(options.range or ())},
        accept=(*limits.get("accept", ()), *(options.accept or ())),
        runs=not options.rules,
        inputs=options.inputs,
        against=options.against,
        function=options.function,
        seed=options.seed,
    )
    told = {key: getattr(options, key) for key in ("off", "error", "difference", "precision")}
    chosen = {key: limits.get(key) if value is None else value for key, value in told.items()}
    return replace(asked, **{key: value for key, value in chosen.items() if value is not None})


def _matching(files: Sequence[str]) -> Iterator[Path]:
    """Yield the named files and the files that patterns match. Raises InputError for a pattern that matches no file."""
    for text in files:
        if Path(text).exists() or not glob.has_magic(text):
            yield Path(text)
            continue
        matching = sorted(glob.glob(text, recursive=True))
        if not matching:
            raise InputError(f"{text}: no file matches")
        yield from map(Path, matching)


def _check_ranges(asked: Asked, reports: Sequence[Report]) -> None:
    """Raise InputError for a range of something that no judged program takes."""
    inputs = {item.name for report in reports for function in report.functions for item in function.shown.inputs}
    for name in asked.ranges:
        if name not in inputs:
            raise InputError(
                f"no program has an input '{name}', of which a range is stated; there are {', '.join(sorted(inputs))}"
            )


def _line_of(text: str) -> str:
    """Return a line of a report, with its indentation."""
    return text[: len(text) - len(text.lstrip())] + _line(text)


def _diff(options: argparse.Namespace) -> int:
    difference = Asked.difference if options.difference is None else options.difference
    asked = Asked(
        difference=difference,
        ranges=dict(options.range or ()),
        inputs=options.inputs,
        against=options.other,
        function=options.function,
        seed=options.seed,
    )
    against = against_of(options.model, asked)
    if options.json:
        print(json.dumps(json_of_against(options.model, against), indent=2, allow_nan=False))
    else:
        print("\n".join(map(_line_of, text_of_against(str(options.model), against))))
    return int(not against.same)


def _compare_compiled(options: argparse.Namespace) -> int:
    differences = compare_compiled(options.first, options.second)
    for difference in differences:
        print(_line(f"{difference.file}: {difference.what}"))
    print(f"{len(differences)} files differ")
    return int(bool(differences))


def _diff_residency(options: argparse.Namespace) -> int:
    rows = read_report(options.measured, "measured")
    differences = diff_residency(read_report(options.predicted, "predicted"), rows)
    for difference in differences:
        print(_line(difference))
    left = sum(row.get("status") == "not_chosen" for row in rows)
    aside = f"; {left} could run on the Neural Engine, but were given to another device" if left else ""
    print(f"{len(differences)} operations differ{aside}")
    return int(bool(differences))
