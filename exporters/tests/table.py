"""Exports every architecture of the tests, and prints the tables of exporters/architectures.md.

    python exporters/tests/table.py [NAME ...]      # an hour on two busy cores

Each tiny random model is exported and run in fp32 and in fp16. An error is the largest of any output's numbers,
relative to the largest number of that output. Where operations run is predicted by the rules of docs/ane-rules.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings

import torch
import transformers
from architectures import DECODERS, IMAGES, SOUNDS, TEXTS, Architecture, tensors
from portable_coreml.judge.placement import judge_package
from torch import Tensor
from transformers_coreml import export_model

KINDS = {"Texts": TEXTS, "Images": IMAGES, "Sounds": SOUNDS, "Decoders, without a cache": DECODERS}
COLUMNS = ("architecture", "fp32", "fp16", "operations", "off")


def main() -> None:
    """Print a table for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures, all by default")
    names = parser.parse_args().names
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    os.environ["TQDM_DISABLE"] = "1"
    for kind, architectures in KINDS.items():
        print(f"\n## {kind}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for name, architecture in architectures.items():
            if not names or name in names:
                print(f"| {name} | {' | '.join(row(architecture))} |", flush=True)


def row(architecture: Architecture) -> list[str]:
    """Return an architecture's cells, or why it can't be exported."""
    try:
        model, inputs = architecture.build()
        with torch.no_grad():
            expected = tensors(model(**inputs))
        errors = []
        for precision in ("fp32", "fp16"):
            exported = export_model(model, inputs, precision=precision, constants=architecture.constants)
            results = tensors(exported(**{key: value for key, value in inputs.items() if isinstance(value, Tensor)}))
            errors.append(f"{max(map(error, results, expected)):.1g}")
        rows = judge_package(exported.program.package_path).rows
    except Exception as failure:
        return [f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:120]}", "", "", ""]
    working = [one for one in rows if one.status != "no_device"]
    return [*errors, str(len(working)), str(sum(one.status == "ineligible" for one in working))]


def error(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    if not expected.numel():
        return 0.0
    largest = expected.double().abs().max().clamp_min(1e-9)
    return float((result.double() - expected.double()).abs().max() / largest)


if __name__ == "__main__":
    main()
