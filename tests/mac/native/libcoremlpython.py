"""coremltools.libcoremlpython as coremltools 9.0 builds it from coremlpython/*.mm (commit 428d4b26).

Programs run on the portable engine; what goes in and comes out is what the native code takes and gives.
The classes and their names are those of CoreMLPython.mm:1063-1116.
"""

from simulated_mac.model import Model as _MLModelProxy
from simulated_mac.model import ModelAsset as _MLModelAssetProxy
from simulated_mac.plan import ComputePlan as _MLComputePlanProxy
from simulated_mac.plan import CPUComputeDevice as _MLCPUComputeDeviceProxy
from simulated_mac.plan import GPUComputeDevice as _MLGPUComputeDeviceProxy
from simulated_mac.plan import NeuralEngineComputeDevice as _MLNeuralEngineComputeDeviceProxy
from simulated_mac.state import State as _State

__all__ = [
    "_MLCPUComputeDeviceProxy",
    "_MLComputePlanProxy",
    "_MLGPUComputeDeviceProxy",
    "_MLModelAssetProxy",
    "_MLModelProxy",
    "_MLNeuralEngineComputeDeviceProxy",
    "_State",
]

for _name in __all__:  # as messages of errors say them
    globals()[_name].__name__ = _name
