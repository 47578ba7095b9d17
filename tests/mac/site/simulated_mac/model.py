"""_MLModelProxy and _MLModelAssetProxy: loads and runs programs (CoreMLPython.mm:1066-1085)."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from simulated_mac import bundles, log, owned, plan, waiting
from simulated_mac.features import arrays, features, returned, tokens
from simulated_mac.native_calls import abort, demand, is_text, ns_error
from simulated_mac.state import State

# What each optimization hint may be (CoreMLPython.mm, setOptimizationHints); other names are ignored.
HINTS = {
    "reshapeFrequency": ("Frequent", "Infrequent"),
    "specializationStrategy": ("Default", "FastPrediction"),
    "allowLowPrecisionAccumulationOnGPU": ("True", "False"),
}
ROUNDING = {"narrow": ("fp16", "fp32"), "wide": ("fp32", "fp16")}  # MAC_WIDTHS: which passes round each result to fp16
_loading = threading.RLock()  # the portable engine's precision is one setting of the process
_passed: set[tuple[Any, ...]] = set()  # shapes that this process has run


class ModelAsset:
    """A model that is loaded by its path, or from memory."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Model:
    """One function of a program, loaded."""

    def __init__(self, *arguments: Any) -> None:
        """Load it, and compiles it first if it is a package (CoreMLPython.mm, Model::Model).

        Args:
            arguments: path, compute units, name of the function, optimization hints and, with a fifth, an asset.
        """
        fits = len(arguments) in (4, 5) and is_text(*arguments[:3]) and isinstance(arguments[3], dict)
        demand(fits, "__init__")
        path, units, function, hints = arguments[:4]
        asset = arguments[4] if len(arguments) == 5 else None
        if asset is not None and not isinstance(asset, ModelAsset):
            raise RuntimeError("Unable to cast Python instance to C++ type")
        self._delete: str | None = None
        if asset is None and not path.rstrip("/").endswith(".mlmodelc"):
            path = self._delete = _compiled(path)
        if units not in plan.UNITS:
            abort('computeUnits == "ALL"', units=units)
        _check_hints(hints)
        start = time.perf_counter_ns()
        if asset is None:
            bundles.check(path)
        seconds = waiting.take("load", path, units, function, repr(sorted(hints.items())))
        self._path, self._function = path, function
        self._narrow, self._wide = _engines(path, function, asset)
        self._inputs = {
            item.name: self._narrow._signature.features[item.name].optional for item in self._narrow._signature.params
        }
        self._load_ns = time.perf_counter_ns() - start
        self._predict_ns: int | None = None
        log.write(
            "load", path=path, function=function, units=units, hints=hints, seconds=seconds,
            thread=threading.current_thread().name,
        )  # fmt: skip

    def __del__(self) -> None:
        """Remove a package's bundle (CoreMLPython.mm, Model::~Model)."""
        if getattr(self, "_delete", None):
            shutil.rmtree(str(self._delete), ignore_errors=True)

    def predict(self, *arguments: Any) -> dict[str, Any]:
        """Return outputs by name; exactly a dictionary and a state, or None, without names (CoreMLPython.mm:1069)."""
        fits = len(arguments) == 2 and isinstance(arguments[0], dict)
        demand(fits and (arguments[1] is None or isinstance(arguments[1], State)), "predict")
        given = arrays(features(arguments[0]), self._inputs)
        return self._predict(given, arguments[1])

    def batchPredict(self, *arguments: Any) -> list[dict[str, Any]]:
        """Return outputs of each dictionary of a list."""
        demand(len(arguments) == 1 and isinstance(arguments[0], list), "batchPredict")
        batch = [arrays(features(one), self._inputs) for one in arguments[0]]
        return [self._predict(given, None) for given in batch]

    def _predict(self, given: dict[str, Any], state: State | None) -> dict[str, Any]:
        self._look_at(state)
        width = tokens(given)
        self._specialise(given, width)
        start = time.perf_counter_ns()
        copied = owned.copies(given)
        try:
            outputs = self._run(copied, state, width)
        except (RuntimeError, ValueError) as error:
            raise ns_error(str(error)) from None
        self._predict_ns = time.perf_counter_ns() - start
        owned.compare(self._path, given, copied)
        owned.keep(self._path, given)
        return {name: returned(value) for name, value in outputs.items()}

    def _look_at(self, state: State | None) -> None:
        """Raise RuntimeError where a state is missing; one of another function is logged."""
        kept = self._narrow._executable.states
        if state is None and kept:
            raise ns_error(f"The input feature for {next(iter(kept))} must be an MLState, but it was not specified.")
        if state is not None and state.made_by != self._function:
            log.write("shared_state", path=self._path, function=self._function, made_by=state.made_by)

    def _specialise(self, given: dict[str, Any], width: int) -> None:
        """Take the time of the first pass of these shapes in this process. Raises RuntimeError if none is allowed."""
        shapes = tuple(sorted((name, array.shape) for name, array in given.items()))
        key = (os.path.realpath(self._path), self._function, shapes)
        if key in _passed:
            return
        try:
            self._narrow._signature.convert(given)
        except ValueError as error:
            raise ns_error(str(error)) from None
        _passed.add(key)
        seconds = waiting.take("first_pass", self._path, self._function, repr(shapes))
        strided = {name: array.strides for name, array in given.items() if not array.flags.c_contiguous}
        log.write(
            "first_pass", path=self._path, function=self._function, tokens=width, strided=strided, seconds=seconds
        )

    def _run(self, given: dict[str, Any], state: State | None, width: int) -> dict[str, Any]:
        if state is None:
            engine = self._wide if self._wide is not None and width > 1 else self._narrow
            return dict(engine.predict(given, None))
        if self._wide is None or width <= 1:
            outputs = self._narrow.predict(given, state.inner)
        else:
            outputs = self._wide.predict(given, _of(state.inner, self._wide))
        if self._wide is not None:
            _round(state.inner.values)
        return dict(outputs)

    def newState(self) -> State:
        """Return states of zeros."""
        from portable_coreml import proxy

        if not self._narrow._executable.states:
            log.write("empty_state", path=self._path)
        return State(proxy.MLStateProxy(self._narrow._executable, self._narrow._model.path), self._function)

    def get_compiled_model_path(self) -> str:
        """Return where the bundle lies."""
        return self._path

    def get_load_duration_in_nano_seconds(self) -> int:
        """Return how long the load took."""
        return self._load_ns

    def get_last_predict_duration_in_nano_seconds(self) -> int | None:
        """Return how long the last pass took; None before the first."""
        return self._predict_ns

    @staticmethod
    def auto_set_specification_version(*arguments: Any) -> bytes:
        """Return a specification with the lowest version that it needs, which is its own for an ML Program."""
        demand(len(arguments) == 1 and isinstance(arguments[0], bytes), "auto_set_specification_version")
        return bytes(arguments[0])

    @staticmethod
    def maximum_supported_specification_version() -> int:
        """Return the newest that coremltools 9.0 knows."""
        from coremltools import _SPECIFICATION_VERSION_IOS_26

        return int(_SPECIFICATION_VERSION_IOS_26)

    @staticmethod
    def create_model_asset_from_path(*arguments: Any) -> Any:
        """Return an asset of a compiled model."""
        demand(len(arguments) == 1 and is_text(*arguments), "create_model_asset_from_path")
        return _asset(Path(arguments[0]))

    @staticmethod
    def create_model_asset_from_memory(*arguments: Any) -> Any:
        """Return an asset of a specification and its weights."""
        fits = len(arguments) == 2 and isinstance(arguments[0], bytes) and isinstance(arguments[1], dict)
        demand(fits, "create_model_asset_from_memory")
        from portable_coreml import proxy

        return _asset(proxy._unpack(*arguments))

    @staticmethod
    def get_model_structure(*arguments: Any) -> Any:
        """Return the operations of a compiled model, without devices."""
        demand(len(arguments) == 1 and is_text(*arguments), "get_model_structure")
        return plan.load(arguments[0], "ALL").model_structure

    @staticmethod
    def get_available_compute_devices() -> list[Any]:
        """Return the devices of this Mac."""
        return plan.devices()

    get_all_compute_devices = get_available_compute_devices
    get_compute_plan = staticmethod(plan.load)
    compileModel = staticmethod(bundles.compile_model)


def _compiled(path: str) -> str:
    """Return the bundle of a package; errors have words of their own (CoreMLPython.mm, Model::Model)."""
    try:
        return bundles.compile_model(path)
    except RuntimeError as error:
        raise RuntimeError(f'Error compiling model: "{error}".') from None


def _check_hints(hints: dict[Any, Any]) -> None:
    """End the process where a hint has a value that the native code does not know; raises where it is no text."""
    for name, allowed in HINTS.items():
        if name not in hints:
            continue
        if not is_text(hints[name]):
            raise RuntimeError("Unable to cast Python instance to C++ type")
        if hints[name] not in allowed:
            abort(f'val == "{allowed[-1]}"', hint=name, value=hints[name])


def _engines(path: str, function: str, asset: ModelAsset | None) -> tuple[Any, Any]:
    """Return the portable engine's model for passes of one token and, where MAC_WIDTHS asks, another for wider ones.

    It computes with one thread: on Core ML nobody chooses a number, and small programs lose by sharing their work.
    """
    import torch
    from portable_coreml import proxy

    torch.set_num_threads(1)
    inner = None if asset is None else asset.inner
    precisions = ROUNDING.get(os.environ.get("MAC_WIDTHS", ""), ("fp16",))
    try:
        with _loading:
            found = []
            for precision in precisions:
                proxy.set_precision(precision)
                found.append(proxy.MLModelProxy(path, "ALL", function, {}, inner))
    except (RuntimeError, OSError) as error:
        raise ns_error(f"Failed to load the model: {error}") from None
    finally:
        proxy.set_precision("fp16")
    return found[0], found[1] if len(found) > 1 else None


def _of(state: Any, model: Any) -> Any:
    """Return the same states for the engine of the other precision."""
    made = object.__new__(type(state))
    made.owner, made.path, made.values = model._executable, state.path, state.values
    return made


def _round(states: dict[str, Any]) -> None:
    """Round states to fp16, whatever computed them."""
    import torch

    for name, value in states.items():
        states[name] = value.to(torch.float16).to(value.dtype)


def _asset(path: Path) -> Any:
    from coremltools.models.model import MLModelAsset
    from portable_coreml import proxy

    return MLModelAsset(ModelAsset(proxy.MLModelAssetProxy(path)))
