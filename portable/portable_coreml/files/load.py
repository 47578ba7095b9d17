"""Loads a model from disk: an .mlpackage, an .mlmodel with an ML Program, or a compiled .mlmodelc bundle.

What it returns is the description that Core ML would show, the program, and where its weight files are.
"""

from __future__ import annotations

from pathlib import Path

from portable_coreml.files.bundle import is_bundle, read_bundle
from portable_coreml.files.model import LoadedModel, parse_spec, read_spec, spec_file


def load_model(path: Path) -> LoadedModel:
    """The model at `path`. Raises ProgramError, naming the file, if it is not a readable ML Program."""
    if is_bundle(path):
        return read_bundle(path)
    spec_path = spec_file(path)
    spec = parse_spec(spec_path)
    return LoadedModel(path, spec_path.parent, int(spec.specificationVersion), spec.description, read_spec(spec, path))
