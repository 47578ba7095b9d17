"""The page over a batch says what the files of each build say, and why one is not there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardmill.files import read_json, write_json
from shardmill.report import index
from shardmill.report.index import BuildRow

PLAN: dict[str, Any] = {
    "kind": "decoder",
    "parts": [{"name": "layers_00_01"}, {"name": "head_0"}, {"name": "embedding"}],
}
SPEED: dict[str, Any] = {
    "pass_seconds": {"1": 0.002, "4": 0.005},
    "machine": {"processor": "a chip"},
    "engine": {"name": "portable"},
}


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A finished model's files, as far as the page reads them."""
    folder = tmp_path / "build/tiny"
    write_json(folder / "plan.json", PLAN)
    write_json(folder / "benchmark/speed.json", SPEED)
    write_json(folder / "parity/stack.json", {"gate": [{"passed": True}, {"passed": True}]})
    write_json(folder / "residency/head_0.json", {"gate": [{"passed": False}]})
    write_json(folder / "witness/head_0.json", {"gate": [{"passed": True}]})
    for verdict in ("parity/stack", "residency/head_0", "witness/head_0"):
        write_json(folder / f"{verdict}.receipt.json", {"outputs": {"verdict": ""}})
    write_json(folder / "parts/head_0.receipt.json", {"outputs": {"part": ""}})
    (folder / "packages/head_0.mlpackage/weights").mkdir(parents=True)
    (folder / "packages/head_0.mlpackage/weights/weight.bin").write_bytes(bytes(3000))
    (folder / "packages/head_0.mlpackage/model").write_bytes(bytes(72))
    (folder / "report.html").touch()
    write_json(folder / "report.receipt.json", {"outputs": {"page": "", "speed": ""}})
    return folder


def test_a_row_says_what_the_files_say(build: Path) -> None:
    assert index.read_row(build, "") == BuildRow(
        name="tiny",
        kind="decoder",
        passed=3,
        gates=4,
        programs=2,
        bytes=3072,
        pass_ms=2.0,
        machine="a chip, portable",
    )


def test_an_encoder_has_no_pass_to_time(build: Path) -> None:
    write_json(build / "benchmark/speed.json", {key: value for key, value in SPEED.items() if key != "pass_seconds"})
    assert index.read_row(build, "").pass_ms is None


def test_a_model_without_a_benchmark_is_finished(build: Path) -> None:
    """Figures that were measured before the config left out the benchmark may lie there still."""
    write_json(build / "report.receipt.json", {"outputs": {"page": ""}})
    row = index.read_row(build, "")
    assert (row.error, row.pass_ms, row.machine) == ("", None, "not run")
    (build / "benchmark/speed.json").unlink()
    assert index.read_row(build, "") == row


def test_without_its_page_a_model_is_not_finished(build: Path) -> None:
    (build / "report.html").unlink()
    assert index.read_row(build, "parity_head_0: psnr is 3") == BuildRow("tiny", "parity_head_0: psnr is 3")
    shutil.rmtree(build)
    assert index.read_row(build, "") == BuildRow("tiny", "not finished")


@pytest.mark.parametrize("file", ["plan.json", "benchmark/speed.json", "parity/stack.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_file_is_a_row_too(build: Path, file: str, content: str) -> None:
    (build / file).write_text(content)
    assert index.read_row(build, "").error.startswith("its files can't be read: ")


def test_a_failed_job_tells_more_than_the_file_that_is_gone(build: Path) -> None:
    (build / "benchmark/speed.json").unlink()  # Snakemake removes what a job is to make anew
    assert index.read_row(build, "benchmark: no room") == BuildRow("tiny", "benchmark: no room")


def test_the_page_names_all(build: Path) -> None:
    rows = [index.read_row(build, ""), BuildRow("models/<b>.yaml", "no <such> thing")]
    index.write_index(build.parent, rows)
    page = (build.parent / "index.html").read_text()
    assert '<a href="tiny/report.html">tiny</a>' in page
    assert "3 of 4" in page and "3\u00a0KiB" in page and "a chip, portable" in page and "2 ms" in page
    assert "1 of 2 not built." in page
    assert "<strong>models/&lt;b&gt;.yaml</strong>: no &lt;such&gt; thing" in page
    assert not re.search(r"https?://", page)
    index.write_index(build.parent, rows[:1])
    assert "Every model is built" in (build.parent / "index.html").read_text()
    assert read_json(build / "plan.json") == PLAN
