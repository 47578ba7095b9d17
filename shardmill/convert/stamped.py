"""Stamped conversion: coremltools converts a few small layers once, and every part is composed from the result.

Layers of one kind share one graph and only the weights differ, so the program of a part is stamped from the templates
of its layers' kinds, and its weights are streamed from the checkpoint into the weight file. The package is that of the
plain conversion, byte for byte, except where plain coremltools would drop or merge an operation because of a weight's
values (a norm weight of nothing but ones; two layers with the same norm weight): here programs never depend on weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from shardmill.convert import package, stream
from shardmill.convert.template import sample
from shardmill.plan import Part

WEIGHT_FILE = Path("Data/com.apple.CoreML/weights/weight.bin")


def convert_stamped(
    part: Part, source: Path, quantization: str, path: Path, cache: Path | None = None, threads: int = 1
) -> None:
    """Writes the canonical .mlpackage of a part at `path`, which must not exist.

    Args:
        part: the part.
        source: the checkpoint's folder.
        quantization: "int8" or "fp16" as in `trace.convert`.
        path: where the package goes.
        cache: a folder in which templates are kept between processes.
        threads: how many encode weights.

    Raises:
        CheckpointError: for a weight that fp16 can't hold.
        StampError: for a graph that can't be stamped. What was written until then stays for the caller to remove.
    """
    import coremltools as ct

    spec = sample.program(part, quantization, cache)
    blobs, weights = stream.place(spec, part)
    with tempfile.TemporaryDirectory() as empty:
        ct.utils.save_spec(spec, str(path), weights_dir=empty)
    stream.write(path / WEIGHT_FILE, blobs, weights, source, threads)
    package.canonicalize(path)
