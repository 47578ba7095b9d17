"""The runner of tests under several settings of the arithmetic: what it tries, what it leaves out, and what it says."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / ".ci/matrix"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module, on a processor with AVX2, without emulators."""
    loader = SourceFileLoader("matrix", str(FILE))
    found = module_from_spec(spec_from_loader("matrix", loader))  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "matrix", found)
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # no cache beside a file without an ending
    loader.exec_module(found)
    monkeypatch.setattr(found, "flags", lambda: {"avx2", "fma"})
    monkeypatch.setattr(found.shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["matrix"])
    return found


def results(matrix: ModuleType, **models: Any) -> dict[str, Any]:
    return {room: matrix.Result(**models) if room == "models" else matrix.Result() for room in matrix.ROOMS}


def test_what_the_processor_lacks_is_named(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    tried: list[dict[str, str]] = []
    monkeypatch.setattr(matrix, "run", lambda setting, *_: tried.append(setting) or results(matrix, passed=3))
    assert matrix.main() == 0
    said = capsys.readouterr().out
    assert "| ATEN_CPU_CAPABILITY=avx512 | not_run: no avx512bw, avx512dq, avx512f, avx512vl |" in said
    assert "| emulated Nehalem | not_run: no qemu-user |" in said and said.count("not_run") == 4
    assert "| ATEN_CPU_CAPABILITY=avx2 | 3 / 0 |" in said and len(tried) == 12
    lowest = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
    assert lowest | {"OMP_NUM_THREADS": "1"} in tried and lowest | {"OMP_NUM_THREADS": "3"} in tried
    highest = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
    assert highest | {"OMP_NUM_THREADS": "2"} in tried


def test_a_failed_test_is_named_and_ends_with_1(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    found = results(matrix, passed=3, failed=["tests.models.test_rope::test_a"], share=0.31, of="a test, a limit")
    monkeypatch.setattr(matrix, "run", lambda *_: found)
    monkeypatch.setattr("sys.argv", ["matrix", "--settings", "all lowest"])
    assert matrix.main() == 1
    said = capsys.readouterr().out
    assert "| all lowest | 3 / 1, 0.31 |" in said and "failed: tests.models.test_rope::test_a" in said
    assert "0.31 (a test, a limit); the goal is 0.25 at most" in said


def test_tests_that_never_ended_are_a_failure(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed, by a signal or for the time it took, writes no report."""
    monkeypatch.setattr(matrix.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr("sys.argv", ["matrix", "--settings", "all lowest", "--rooms", "portable"])
    assert matrix.main() == 1


def test_a_report_and_the_shares_are_counted_by_room(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tested(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        assert env["MKL_CBWR"] == "AVX2" and "ATEN_CPU_CAPABILITY" not in env
        (report,) = (Path(one.partition("=")[2]) for one in command if one.startswith("--junitxml"))
        cases = "".join(
            f'<testcase classname="{where}.test_x" name="{name}">{inside}</testcase>'
            for where, name, inside in (
                ("tests.gates", "a", ""),
                ("tests.gates", "b", "<failure/>"),
                ("tests.gates", "c", "<skipped/>"),
                ("portable.tests.run", "d", ""),
            )
        )
        report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        seen = (("tests/gates/test_x.py::a", 0.1), ("tests/gates/test_x.py::b", 1.5), ("portable/tests/x.py::d", 0.2))
        Path(env["LIMITS_SEEN"]).write_text("".join(f"{test}\tof it\t{share}\n" for test, share in seen))

    monkeypatch.setattr(matrix.subprocess, "run", tested)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    found = matrix.run({"MKL_CBWR": "AVX2"}, ["tests/gates"], tmp_path / "one")
    assert (found["gates"].passed, found["gates"].failed) == (1, ["tests.gates.test_x::b"])
    assert (found["gates"].share, found["gates"].of) == (1.5, "tests/gates/test_x.py::b, of it")
    assert (found["portable"].passed, found["portable"].share) == (1, 0.2)


def test_every_room_has_files_that_judge_numbers(matrix: ModuleType) -> None:
    """A room that lost them would pass, and nobody would see it."""
    for room in matrix.ROOMS:
        assert matrix.files([room]), room
