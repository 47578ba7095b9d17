"""Operations of ML Programs that language models don't use, for the portable engine.

Images (resizing, cropping, pooling, transposed convolutions), recurrent layers, lists of tensors, random and quantised
numbers, normalisations and activations of older networks; and inputs and outputs that are pictures. The portable engine
imports this package, where it is installed, when a program first needs an operation that the engine itself lacks.
"""

from portable_coreml_extra import image, lists, numbers, pictures, recurrent, spatial

__version__ = "0.1.0"
__all__ = ["image", "lists", "numbers", "pictures", "recurrent", "spatial"]
