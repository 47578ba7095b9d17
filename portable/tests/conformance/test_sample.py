"""A fixed sample of coremltools' own tests, run unmodified with the portable engine installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conformance.suites import SUITES, Case, read_cases, reasons, run_slice, table
from tests.conftest import PATIENCE

FUNCTIONS = "test/ml_program/test_utils.py"  # programs of several functions, from ranges of shapes among others
SAMPLE = (
    ("converters/mil/frontend/torch/test/test_torch_stateful_model.py", "0/1", ""),
    ("converters/mil/mil/ops/tests/iOS18", "3/40", ""),
    ("converters/mil/mil/ops/tests/iOS14/test_tensor_transformation.py", "3/12", ""),
    ("converters/mil/mil/ops/tests/iOS14/test_reduction.py", "1/12", ""),
    (FUNCTIONS, "0/1", "MultiFunction or multifunc"),
    (FUNCTIONS, "3/8", "Materialize"),
)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Outcomes of the sample; on a Mac coremltools' tests run on Core ML by themselves."""
    if sys.platform == "darwin":
        pytest.skip("Core ML is present: coremltools' own tests need no help")
    for package in ("PIL", "parameterized"):
        pytest.importorskip(package, reason=f"coremltools' tests need {package}")
    out = tmp_path_factory.mktemp("conformance") / "cases.jsonl"
    for suite, piece, select in SAMPLE:
        run_slice([suite], piece, out, ["-k", select] if select else [], timeout=PATIENCE)
    return read_cases([out])


def test_every_case_of_the_sample_passes(cases: list[Case]) -> None:
    """No failures, and enough cases that the sample means something. Failing, it prints the table."""
    failed = [case for case in cases if case.result == "failed"]
    assert not failed, f"{reasons(cases, 'failed')}\n{table(cases)}"
    assert sum(case.result == "passed" for case in cases) >= 40


def test_the_stateful_models_were_run(cases: list[Case]) -> None:
    """The suite that is nearest to what this project converts."""
    assert sum(case.suite == SUITES[0] and case.result == "passed" for case in cases) >= 10


def test_programs_of_several_functions_were_run(cases: list[Case]) -> None:
    """Saved from several packages, or made of one with a range of shapes: every function predicts by its name."""
    found = [case for case in cases if case.suite == FUNCTIONS and case.result == "passed"]
    assert len(found) >= 18
    assert sum(case.predictions for case in found) >= 30


def test_tables_count_by_suite_and_operation(tmp_path: Path) -> None:
    """One row per operation, one column per outcome; reasons grouped, the commonest first."""
    made = [
        Case("a", "converters/mil/mil/ops/tests/iOS14/test_pool.py", "MaxPool", "passed", ""),
        Case("b", "converters/mil/mil/ops/tests/iOS14/test_pool.py", "MaxPool", "failed", "wrong | by 1"),
        Case("c", "converters/mil/mil/ops/tests/iOS14/test_pool.py", "AvgPool", "not applicable", "skipped"),
    ]
    assert table(made).splitlines()[2:] == [
        "| ops/iOS14/test_pool.py | AvgPool | 0 | 0 | 0 | 1 |",
        "| ops/iOS14/test_pool.py | MaxPool | 1 | 1 | 0 | 0 |",
    ]
    assert "| ops/iOS14/test_pool.py | MaxPool | 1 | wrong \\| by 1 |" in reasons(made, "failed")
