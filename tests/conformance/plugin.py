"""A pytest plugin that lets coremltools' own tests predict: installs the portable engine and records every outcome.

coremltools' tests skip their numerical half unless `_IS_MACOS`; the plugin sets that name and leaves the tests as
they are. Cases for the old neuralnetwork format are deselected: the portable engine runs ML Programs. With
CONFORMANCE_OUT set, one JSON line per case is appended to that file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardmill.portable

MAX_REASON = 300


def pytest_configure(config: pytest.Config) -> None:
    """Installs the engine before any test module is imported."""
    shardmill.portable.install(os.environ.get("CONFORMANCE_PRECISION", "fp32"))
    import coremltools._deps  # noqa: PLC0415
    import torch  # noqa: PLC0415

    coremltools._deps._IS_MACOS = True
    torch.set_num_threads(1)
    config.addinivalue_line("filterwarnings", "ignore")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps ML Program cases, and of those the slice `CONFORMANCE_SLICE=index/count`."""
    kept = [item for item in items if not _is_neural_network(item)]
    index, count = (int(n) for n in os.environ.get("CONFORMANCE_SLICE", "0/1").split("/"))
    chosen = kept[index::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def _is_neural_network(item: pytest.Item) -> bool:
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    backend = params.get("backend")
    kind = backend[0] if isinstance(backend, tuple) else getattr(backend, "backend", "mlprogram")
    return kind == "neuralnetwork"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Writes down the outcome of a case: passed, failed or skipped, with the reason."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    target = os.environ.get("CONFORMANCE_OUT")
    if target is None or (report.when != "call" and report.passed) or report.when == "teardown":
        return
    result = "not applicable" if report.skipped or _fails_without_us(report, call) else report.outcome
    row = {
        "case": item.nodeid,
        "suite": suite_of(item),
        "group": group_of(item),
        "result": result,
        "reason": _reason(report),
    }
    with Path(target).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _fails_without_us(report: pytest.TestReport, call: pytest.CallInfo[None]) -> bool:
    """Whether a case failed while coremltools converted, or for want of a package: before the engine was asked."""
    if not report.failed or call.excinfo is None:
        return False
    if isinstance(call.excinfo.value, (NameError, ImportError)):
        return True
    paths = [str(entry.path) for entry in call.excinfo.traceback]
    return any(p.endswith("_converters_entry.py") for p in paths) and not any("shardmill" in p for p in paths)


def suite_of(item: pytest.Item) -> str:
    """The test file, relative to the coremltools package."""
    return str(item.path).rsplit("coremltools/", 1)[-1]


def group_of(item: pytest.Item) -> str:
    """The operation under test: the test class without its `Test`, or the function's name."""
    owner = getattr(item, "cls", None)
    name = owner.__name__ if owner is not None else getattr(item, "originalname", item.name)
    return re.sub(r"^[Tt]est_?", "", name)


def _reason(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:MAX_REASON]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).splitlines()[0][:MAX_REASON]
