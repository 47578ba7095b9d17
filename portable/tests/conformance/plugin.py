"""A pytest plugin that lets coremltools' own tests predict: installs the portable engine and records every outcome.

The tests stay as they are; what they ask about their surroundings is answered as on a Mac with Apple silicon:
- `_IS_MACOS`, without which they skip their numerical half, is true;
- `platform.machine()` is not "x86_64", which they take for an Intel Mac with its old PyTorch;
- models come through TorchScript, the frontend that this project converts with;
- the converter's `int()` of an array with one element, which numpy 2.4 refuses, works (coremltools 9.0 is older).
Cases for the old neuralnetwork format are deselected: the portable engine runs ML Programs. Every model that a test
loads is compiled, too, and the bundle must hold the same program, or the case fails. With CONFORMANCE_OUT set, one
JSON line per case is appended to that file, with the number of predictions that the case made.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import portable_coreml
import pytest

MAX_REASON = 300
OLD_FORMAT = "the portable engine runs ML Programs only"  # how load.py refuses a neuralNetwork
PREDICTIONS = [0]
ENGINE = "portable"  # the folder of the engine's modules
ABSENT = re.compile(r"not found|torchvision")  # "TensorFlow 2.x not found."


def pytest_configure(config: pytest.Config) -> None:
    """Installs the engine before any test module is imported."""
    os.environ.setdefault("TORCH_FRONTENDS", "TORCHSCRIPT")
    portable_coreml.install(os.environ.get("CONFORMANCE_PRECISION", "fp32"))
    import coremltools._deps
    import torch

    coremltools._deps._IS_MACOS = True
    _count_predictions()
    _compile_every_model()
    _mend_int()
    platform.machine = lambda: "arm64"
    torch.set_num_threads(1)
    config.addinivalue_line("filterwarnings", "ignore")


def _count_predictions() -> None:
    from portable_coreml.proxy import MLModelProxy

    original = MLModelProxy.predict

    def predict(self: MLModelProxy, *args: Any, **kwargs: Any) -> dict[str, Any]:
        PREDICTIONS[0] += 1
        return original(self, *args, **kwargs)

    MLModelProxy.predict = predict  # type: ignore[method-assign]


def _compile_every_model() -> None:
    from portable_coreml.files.bundle import compile_model, load_model
    from portable_coreml.files.model import LoadedModel
    from portable_coreml.proxy import MLModelProxy

    from tests.same import differences

    original = MLModelProxy.__init__

    def load(self: MLModelProxy, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        model: LoadedModel = self._model
        if (model.path / "coremldata.bin").is_file():
            return
        with tempfile.TemporaryDirectory() as folder:
            bundle = load_model(compile_model(model.path, Path(folder) / "m.mlmodelc"))
        different = next(differences(model.program, bundle.program), None)
        assert different is None, f"the compiled program differs: {different}"

    MLModelProxy.__init__ = load  # type: ignore[method-assign]


class _Whole(int):
    """int(), also of an array with one element of any rank."""

    def __new__(cls, value: Any) -> Any:
        import numpy as np

        return int(np.asarray(value).item())


def _mend_int() -> None:
    from coremltools.converters.mil.frontend.torch import ops

    original = ops._cast

    def cast(context: Any, node: Any, dtype: type, dtype_name: str) -> None:
        original(context, node, _Whole if dtype is int else dtype, dtype_name)

    ops._cast = cast


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
    kind = backend[0] if isinstance(backend, (tuple, list)) else getattr(backend, "backend", "mlprogram")
    return kind == "neuralnetwork"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Writes down the outcome of a case, with the reason where it did not pass."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    target = os.environ.get("CONFORMANCE_OUT")
    predictions, PREDICTIONS[0] = PREDICTIONS[0], 0
    if target is None or (report.when != "call" and report.passed) or report.when == "teardown":
        return
    row = {
        "case": item.nodeid,
        "suite": suite_of(item),
        "group": group_of(item),
        "result": result_of(report, call, predictions),
        "reason": _reason(report),
        "predictions": predictions,
    }
    with Path(target).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def result_of(report: pytest.TestReport, call: pytest.CallInfo[None], predictions: int) -> str:
    """passed, failed, "not applicable" or "not run".

    Not applicable: coremltools skips the case, or expects it to fail, on every platform; or it is about the old
    format. Not run: a package that the case needs is not installed, or the case failed before the engine was asked,
    in coremltools' converter or in PyTorch.
    """
    if report.skipped:
        return "not run" if ABSENT.search(_reason(report)) else "not applicable"
    if not report.failed or call.excinfo is None:
        return report.outcome
    if OLD_FORMAT in str(call.excinfo.value):
        return "not applicable"
    return "not run" if not predictions and _failed_without_us(call.excinfo) else "failed"


def _failed_without_us(failure: pytest.ExceptionInfo[BaseException]) -> bool:
    if isinstance(failure.value, (AssertionError, pytest.fail.Exception)):
        return False
    return not any(ENGINE in entry.path.parts for entry in failure.traceback if isinstance(entry.path, Path))


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
