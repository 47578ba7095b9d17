"""The classes of coremltools' native module, on the portable engine.

Names and signatures match the calls in coremltools 9.0's Python code (models/model.py, _compiled_model.py,
utils.py). `module()` builds the module object that install() puts in place of `coremltools.libcoremlpython`.

What loads or judges a model imports torch, which takes most of a second; what compiles one does not need it.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from portable_coreml import compute_plan
from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ExecutionError, InputError, PortableError, first_line
from portable_coreml.files.blob import WeightLoader, resolve
from portable_coreml.files.bundle import compile_model, load_model
from portable_coreml.files.model import MAX_SPEC_VERSION, LoadedModel, pick_function

if TYPE_CHECKING:
    from torch import Tensor

    from portable_coreml.run.execute import Executable

HINTS = {
    "reshapeFrequency": ("Frequent", "Infrequent"),
    "specializationStrategy": ("Default", "FastPrediction"),
    "allowLowPrecisionAccumulationOnGPU": ("True", "False"),
}
PLAIN = ("fp32", "fp16")  # precisions without options
_settings = {"precision": "fp32"}
_inside: ContextVar[str] = ContextVar("precision", default="")


def set_precision(precision: str) -> None:
    """Set the precision of models that are loaded from now on, in every thread. Raises ValueError if it is unknown."""
    _settings["precision"] = _checked(precision)


def precision() -> str:
    """Return the precision of models that this thread loads now."""
    return _inside.get() or _settings["precision"]


@contextmanager
def loading_as(precision: str) -> Iterator[None]:
    """Load models in `precision` inside the `with` block, in this thread alone. Raises ValueError if it is unknown."""
    before = _inside.get()
    _inside.set(_checked(precision))
    try:
        yield
    finally:
        _inside.set(before)  # not reset by a token: a generator may be closed in another context


def _checked(precision: str) -> str:
    if precision not in PLAIN:
        from portable_coreml.run.ane import options_of

        options_of(precision)
    return precision


class MLStateProxy:
    """The states of one conversation with a loaded model; no other model takes them.

    Attributes:
        owner: the loaded function that made the states.
        path: the path of the loaded model.
        values: each state's tensor by name.
    """

    def __init__(self, executable: Executable, path: Path) -> None:
        self.owner = executable
        self.path = path
        self.values = executable.new_state()

    def _check(self, name: str) -> None:
        if name not in self.values:
            raise InputError(f"the model has no state '{name}'; its states are {sorted(self.values)}")

    def read_state(self, name: str) -> np.ndarray:
        """Return a copy of a state: float16 in fp16 mode, float32 in fp32 mode."""
        self._check(name)
        array = self.values[name].numpy()
        half = self.owner.half and self.owner.states[name].dtype == "fp16"
        return array.astype(np.float16 if half else array.dtype, copy=True)

    def write_state(self, name: str, value: Any) -> None:
        """Replace a state by a copy of `value`. Raises InputError if the shape differs."""
        from portable_coreml.run.signature import to_tensor

        self._check(name)
        array, kind = np.asarray(value), self.owner.states[name]
        if array.shape != tuple(self.values[name].shape):
            raise InputError(f"state '{name}' has shape {list(self.values[name].shape)}, not {list(array.shape)}")
        self.values[name] = to_tensor(array, kind, name, self.owner.half).clone().to(BY_NAME[kind.dtype].torch)


class MLModelProxy:
    """A loaded model."""

    def __init__(
        self,
        path: str,
        compute_units: str = "ALL",
        function_name: str = "",
        optimization_hints: Mapping[str, str] | None = None,
        asset: Any = None,
    ) -> None:
        from portable_coreml.judge.loadable import check_loadable
        from portable_coreml.run.execute import Executable, declared_types
        from portable_coreml.run.signature import Signature

        start = time.perf_counter_ns()
        _check_hints(optimization_hints or {})
        self._model = asset.model() if asset is not None else load_model(Path(path))
        function, description = pick_function(self._model, function_name)
        check_loadable(self._model, function, description)
        loader = WeightLoader(self._model.model_dir)
        self._executable = Executable(function, loader, precision(), loader.place)
        self._signature = Signature(function, description, self._executable.inputs, self._executable.half)
        self._types = declared_types(function)
        self._load_ns = time.perf_counter_ns() - start
        self._predict_ns: int | None = None
        self._compiled: str | None = None

    def predict(self, data: Mapping[str, Any], state: MLStateProxy | None = None) -> dict[str, Any]:
        """Return outputs by name. Without a state, a stateful model predicts from zeros and forgets.

        Raises InputError for inputs that don't fit, and for a state that another program has made.
        """
        start = time.perf_counter_ns()
        inputs = self._signature.convert(data)
        states = self._executable.new_state() if state is None else self._own(state)
        values = self._run(inputs, states)
        results = self._signature.results(self._executable.outputs, values, self._types)
        self._predict_ns = time.perf_counter_ns() - start
        return results

    def _own(self, state: MLStateProxy) -> dict[str, Tensor]:
        """Return the values of a state that this model has made, or another function of the same program.

        Names and shapes that match don't make it this model's.
        """
        made_here = state.owner is self._executable
        if not made_here and not (state.path == self._model.path and _shares_states(state.owner, self._executable)):
            raise InputError(
                f"the state was made by another loaded model, of {state.path}; use make_state() of {self._model.path}"
            )
        return state.values

    def _run(self, inputs: dict[str, Tensor], states: dict[str, Tensor]) -> tuple[Tensor, ...]:
        try:
            return self._executable.run(inputs, states)
        except PortableError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ExecutionError(f"Unable to compute the prediction using ML Program: {first_line(error)}") from error

    def batchPredict(self, batch: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self.predict(data) for data in batch]

    def newState(self) -> MLStateProxy:
        if not self._executable.states:
            raise PortableError("the model has no states")
        return MLStateProxy(self._executable, self._model.path)

    def get_compiled_model_path(self) -> str:
        """Return a compiled bundle of this model, made when first asked for and deleted when the process ends."""
        if (self._model.path / "coremldata.bin").is_file():
            return str(self._model.path)
        if self._compiled is None:
            self._compiled = _compile_to_temporary(self._model.path)
        return self._compiled

    def get_load_duration_in_nano_seconds(self) -> int:
        return self._load_ns

    def get_last_predict_duration_in_nano_seconds(self) -> int | None:
        return self._predict_ns

    @staticmethod
    def maximum_supported_specification_version() -> int:
        return MAX_SPEC_VERSION

    @staticmethod
    def auto_set_specification_version(spec: Any) -> Any:
        """Return the model as it is: the version of an ML Program's operation set can't be lowered.

        Other models pass unchanged.
        """
        return spec

    @staticmethod
    def compileModel(path: str) -> str:
        """Compile a package to a temporary folder, which is removed at exit if the caller has moved the bundle."""
        source, folder = Path(path), Path(tempfile.mkdtemp(prefix="mlmodelc_"))
        atexit.register(_remove_empty, folder)
        return str(compile_model(source, folder / f"{source.stem}.mlmodelc"))

    @staticmethod
    def create_model_asset_from_path(path: str) -> Any:
        from coremltools.models.model import MLModelAsset

        return MLModelAsset(MLModelAssetProxy(Path(path)))

    @staticmethod
    def create_model_asset_from_memory(spec: bytes, blobs: Mapping[str, bytes]) -> Any:
        from coremltools.models.model import MLModelAsset

        return MLModelAsset(MLModelAssetProxy(_unpack(spec, blobs)))

    @staticmethod
    def get_compute_plan(path: str, compute_units: str) -> Any:
        return compute_plan.compute_plan(load_model(Path(path)), compute_units)

    @staticmethod
    def get_model_structure(path: str) -> Any:
        return compute_plan.model_structure(load_model(Path(path)).program)

    @staticmethod
    def get_available_compute_devices() -> list[Any]:
        return compute_plan.devices()[:1]

    @staticmethod
    def get_all_compute_devices() -> list[Any]:
        return compute_plan.devices()[:1]


def _check_hints(hints: Mapping[str, str]) -> None:
    """Accept the hints that Core ML accepts; hints do not change this engine's results.

    Raises InputError for any other hint; the native module would abort (setOptimizationHints, CoreMLPython.mm).
    """
    for name, value in hints.items():
        if value not in HINTS.get(name, ()):
            raise InputError(f"there is no optimization hint {name} = {value}")


def _shares_states(one: Executable, other: Executable) -> bool:
    """Return whether two executables are functions of one program that keep the same states, at one precision.

    Core ML's headers don't say whose states a model takes; ANEMLL's runtimes give the functions of a program one state.
    """
    return one.function.name != other.function.name and one.states == other.states and one.half == other.half


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _compile_to_temporary(source: Path) -> str:
    """Compile to a temporary directory that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="mlmodelc_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(compile_model(source, folder / f"{source.stem}.mlmodelc"))


class MLModelAssetProxy:
    """A model that can be loaded several times: a path to a package or bundle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def model(self) -> LoadedModel:
        return load_model(self._path)


def _unpack(spec: bytes, blobs: Mapping[str, bytes]) -> Path:
    """Write an in-memory model where files can be opened; `blobs` maps blob paths to their bytes."""
    folder = Path(tempfile.mkdtemp(prefix="mlasset_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, data in blobs.items():
        target = resolve(name, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (folder / "model.mlmodel").write_bytes(spec)
    return folder / "model.mlmodel"


def module() -> ModuleType:
    """Return a module object with the names that coremltools imports from `libcoremlpython`."""
    made = ModuleType("coremltools.libcoremlpython", __doc__)
    names = {
        "_MLModelProxy": MLModelProxy,
        "_MLModelAssetProxy": MLModelAssetProxy,
        "_MLComputePlanProxy": compute_plan.ComputePlanProxy,
        "_MLCPUComputeDeviceProxy": compute_plan.CPUComputeDeviceProxy,
        "_MLGPUComputeDeviceProxy": compute_plan.GPUComputeDeviceProxy,
        "_MLNeuralEngineComputeDeviceProxy": compute_plan.NeuralEngineComputeDeviceProxy,
        "_MLStateProxy": MLStateProxy,
    }
    for name, item in names.items():
        setattr(made, name, item)
    return made
