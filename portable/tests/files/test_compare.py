"""Two bundles of one package: what may differ between compilers, and what may not."""

from __future__ import annotations

from pathlib import Path

from portable_coreml.files.bundle import compile_model
from portable_coreml.files.compare import compare_compiled


def test_bundles_are_compared_but_for_what_may_differ(attention_package: Path, tmp_path: Path) -> None:
    """buildInfo may differ; a changed line, a changed weight file and a missing file may not."""
    one, two = (compile_model(attention_package, tmp_path / n / "m.mlmodelc") for n in ("a", "b"))
    text = (two / "model.mil").read_text()
    (two / "model.mil").write_text(text.replace("shardmill-portable", "3600.16.1"))
    assert compare_compiled(one, two) == ()
    (two / "model.mil").write_text(text.replace("softmax(", "relu("))
    weights = (two / "weights" / "weight.bin").read_bytes()
    (two / "weights" / "weight.bin").unlink()
    (two / "weights" / "weight.bin").write_bytes(weights[:-1] + b"x")
    (two / "analytics" / "coremldata.bin").unlink()
    assert [d.file for d in compare_compiled(one, two)] == [
        "analytics/coremldata.bin",
        "model.mil",
        "weights/weight.bin",
    ]


def test_headers_and_trailers_of_equal_descriptions_are_compared(attention_package: Path, tmp_path: Path) -> None:
    """The number of the format, at byte 4, is what no public bundle of specification 9 settles."""
    one, two = (compile_model(attention_package, tmp_path / n / "m.mlmodelc") for n in ("a", "b"))
    data = (two / "coremldata.bin").read_bytes()
    (two / "coremldata.bin").write_bytes(data[:4] + b"\5" + data[5:])
    (difference,) = compare_compiled(one, two)
    assert (difference.file, difference.what) == (
        "coremldata.bin",
        "the headers differ, first at their byte 4: 09 and 05",
    )
    (two / "coremldata.bin").write_bytes(data[:-16])
    (difference,) = compare_compiled(one, two)
    assert difference.what == "the trailers differ, first at their byte 0: f6 and nothing"
