"""Stamped conversion: coremltools converts a few small layers once, and every part is composed from the result.

Layers of one kind share one graph and only the weights differ, so the program of a part is stamped from the templates
of its layers' kinds, and its weights are streamed from the checkpoint into the weight file. The package is that of the
plain conversion, byte for byte, except where plain coremltools would drop or merge an operation because of a weight's
values (a norm weight of nothing but ones; two layers with the same norm weight): here programs never depend on weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from shardmill.convert import package, stream
from shardmill.convert.codes import Codes
from shardmill.convert.enumerated import enumerate_shapes
from shardmill.convert.functions import by_function, combined, share_places
from shardmill.convert.package import WEIGHT_FILE
from shardmill.convert.placing import fill_inline, place
from shardmill.convert.reform import reform
from shardmill.convert.template import sample
from shardmill.forms.form import FP16, INT8, spread
from shardmill.models.calls import ENUMERATED, FIXED, MAIN
from shardmill.plan import Part


def convert_stamped(
    part: Part,
    source: Path,
    forms: str | Mapping[str, str],
    path: Path,
    cache: Path | None = None,
    threads: int = 1,
    codes: Path | None = None,
) -> None:
    """Writes the canonical .mlpackage of a part at `path`, which must not exist.

    Args:
        part: the part.
        source: the checkpoint's folder.
        forms: of the part's matrices by their paths, or one for all, as in `trace.convert`.
        path: where the package goes.
        cache: a folder in which templates are kept between processes.
        threads: how many encode weights.
        codes: a file of codes (convert/codes.py) in place of rounding to nearest.

    Raises:
        CheckpointError: for a weight that fp16 can't hold.
        StampError: for a graph that can't be stamped. What was written until then stays for the caller to remove.
        ShardmillError: for codes that do not fit the part.
    """
    import coremltools as ct

    chosen = spread(forms, part.shapes)
    base = FP16 if set(chosen.values()) <= {FP16} else INT8
    one_each = dict(by_function(part)) or {MAIN: part}
    specs = {name: sample.program(one, base, cache) for name, one in one_each.items()}
    known = Codes(codes, part, chosen) if codes else None
    for name, each in specs.items():
        if base == INT8:
            reform(each, chosen)
        fill_inline(each, one_each[name], source, known)
    spec, *others = specs.values()
    blobs, contents = place(spec, part, chosen, known)
    if part.calls.shapes == FIXED:
        share_places(spec, others)
        spec = combined(specs)
    if part.calls.shapes == ENUMERATED:
        enumerate_shapes(spec, part.calls.widths)
    with tempfile.TemporaryDirectory() as empty:
        ct.utils.save_spec(spec, str(path), weights_dir=empty)
    stream.write(path / WEIGHT_FILE, blobs, contents, source, threads)
    package.canonicalize(path)
