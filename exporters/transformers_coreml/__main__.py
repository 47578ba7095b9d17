"""Makes a Core ML package of a checkpoint, and compares it with transformers: python -m transformers_coreml --help."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

import transformers
from transformers.exporters.base import ExportedModel

from transformers_coreml import export_model, features

EPILOG = """\
Each --input states an input's type (float or int), its sizes and the least and largest number that it has:

    python -m transformers_coreml siglip/ out/ --class SiglipVisionModel \\
        --input pixel_values=float:1x3x224x224:-1:1

An input whose least and largest numbers are the same is a constant of the program, such as a mask of ones.
"""


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 if every output agrees, 1 if one does not, 2 if nothing was compared."""
    parser = argparse.ArgumentParser(
        "python -m transformers_coreml",
        description="Make a Core ML package of a checkpoint of transformers, and compare it with the model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="its folder")
    parser.add_argument("out", type=Path, help="a folder to be made: model.mlpackage, config.json, comparison.json")
    parser.add_argument("--class", dest="kind", required=True, metavar="CLASS", help="transformers' class of the model")
    parser.add_argument("--part", default="", metavar="PATH", help="a module of the model, such as encoder")
    parser.add_argument("--input", action="append", required=True, metavar="NAME=TYPE:SIZES:LEAST:LARGEST")
    parser.add_argument("--error", type=float, default=0.01, help="of an output in fp16 that is allowed; 0.01")
    parser.add_argument("--random-weights", action="store_true", help="read config.json alone")
    asked = parser.parse_args(arguments)
    if asked.out.exists():
        return _refused(f"{asked.out}: is there already; name another folder, or remove it")
    try:
        inputs = [features.input_of(text) for text in asked.input]
        model = features.model_of(asked.checkpoint, asked.kind, asked.part, weights=not asked.random_weights)
        arrays = features.check_inputs(model, inputs)
    except features.FeaturesError as error:
        return _refused(str(error))
    begun = time.monotonic()
    constants = tuple(one.name for one in inputs if one.low == one.high)

    def made(precision: str, limit: float) -> tuple[ExportedModel, list[features.Compared]]:
        exported = export_model(model, arrays, precision=precision, constants=constants)
        return exported, features.compare(model, exported, inputs, precision, limit)

    try:
        # In fp32 alone does a difference say that the program is not the model's; fp16 is what the package has.
        of_graph = made("fp32", features.EXACT)[1]
        exported, rows = made("fp16", asked.error)
    except Exception as error:  # of torch, transformers or coremltools: whatever they say
        return _refused(f"{asked.kind} can't be exported: {features.line_of(error)}")
    rows = [*of_graph, *rows]
    exported.save_pretrained(asked.out)
    package = asked.out / "model.mlpackage"
    size = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
    print(f"{package}: {size / 1e6:.1f} MB, made and compared in {time.monotonic() - begun:.0f} s")
    weights = {"weights": "random"} if asked.random_weights else {}
    features.write_comparison(asked.out / "comparison.json", rows, {"class": asked.kind, "part": asked.part, **weights})
    for row in rows:
        says = "ok" if row.passed else f"MORE THAN {row.limit:g}"
        print(f"{row.output}, {row.inputs} inputs, {row.precision}: {row.error:.1e} {says}")
    ranges = " ".join(f"--range {one.name}={one.low:g}:{one.high:g}" for one in inputs if one.low < one.high)
    print(f"next: portable-coreml judge {package} {ranges}")
    return 0 if all(row.passed for row in rows) else 1


def _quiet() -> None:
    """Keep libraries from writing of versions and deprecations; progress is left."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _refused(why: str) -> int:
    print(f"transformers_coreml: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    _quiet()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("transformers_coreml: interrupted", file=sys.stderr)
        sys.exit(130)
