"""A Core ML backend for transformers.exporters. Importing it registers the format `coreml` there.

    from transformers_coreml import export_model

    exported = export_model(model, {"pixel_values": pixels})
    exported.save_pretrained("vit")

On Linux the programs run in portable-coreml, which must be installed; on a Mac Core ML runs them.
"""

from transformers_coreml.exporter import CoreMLConfig, CoreMLExporter, export_model, register
from transformers_coreml.runner import CoreMLRunner

__version__ = "0.1.0"
__all__ = ["CoreMLConfig", "CoreMLExporter", "CoreMLRunner", "export_model", "register"]

register()
