"""`metadata.json` of a compiled bundle: the summary that Xcode shows. Core ML does not read it.

Contents follow the bundles of Apple's compiler (for iOS17, FluidInference/mobius KokoroNoise and the bundles published
with rebeckerspecialties/mlmodelc-export). Apple's order of keys varies from run to run; here the order is fixed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from portable_coreml.dtypes import BY_NAME
from portable_coreml.files.features import Feature, feature_of
from portable_coreml.files.model import LoadedModel
from portable_coreml.program import Blob, Function, Op, TensorType, Value

_ARRAY_NAMES = {"fp16": "Float16", "fp32": "Float32", "fp64": "Double", "int32": "Int32", "int8": "Int8"}
_SINCE_IOS15 = frozenset({"pad", "select", "split", "upsample_nearest_neighbor"})  # defined anew never since
_SINCE_IOS17 = frozenset({"transpose", "squeeze", "expand_dims", "concat", "slice_by_index"})  # not in iOS16
_ONLY_IOS16 = frozenset({"relu", "cumsum", "avg_pool", "fill_like", "upsample_bilinear"})  # not in iOS17
_AVAILABILITY = {
    6: ("12.0", "15.0", "8.0", "1.0"),
    7: ("13.0", "16.0", "9.0", "1.0"),
    8: ("14.0", "17.0", "10.0", "1.0"),
    9: ("15.0", "18.0", "11.0", "2.0"),
    10: ("26.0", "26.0", "26.0", "26.0"),
}  # specification version -> macOS, iOS, watchOS, visionOS
_PREFIXES = {"CoreML6": "Ios16", "CoreML7": "Ios17", "CoreML8": "Ios18", "CoreML9": "Ios26"}


def metadata_json(model: LoadedModel, name: str) -> str:
    """Return the document for a model compiled from a file called `name`."""
    description = model.description
    main = model.program.functions.get(description.defaultFunctionName or "main")
    main = main or next(iter(model.program.functions.values()))
    described = next((f for f in description.functions if f.name == main.name), description)
    entry: dict[str, Any] = {"metadataOutputVersion": "3.0", **_summary(main, described)}
    for key in ("shortDescription", "author", "license"):
        if getattr(description.metadata, key):
            entry[key] = getattr(description.metadata, key)
    if description.metadata.versionString:
        entry["version"] = description.metadata.versionString
    entry |= {
        "modelParameters": [],
        "specificationVersion": model.spec_version,
        "isUpdatable": "0",
        "availability": _availability(model.spec_version),
        "modelType": {"name": "MLModelType_mlProgram"},
        "userDefinedMetadata": dict(sorted(description.metadata.userDefined.items())),
        "generatedClassName": re.sub(r"\W", "_", name),
        "method": "predict",
    }
    storage = _storage_precision(main)
    if storage:
        entry["storagePrecision"] = storage
    if description.functions:
        entry["functions"] = [
            {"name": f.name, **_summary(model.program.functions[f.name], f)}
            for f in description.functions
            if f.name in model.program.functions
        ]
        entry["defaultFunctionName"] = main.name
    text = json.dumps([entry], indent=2, sort_keys=True, ensure_ascii=False, separators=(",", " : "))
    return text + "\n"


def _summary(function: Function, described: Any) -> dict[str, Any]:
    return {
        "inputSchema": [_schema(m) for m in described.input],
        "outputSchema": [_schema(m) for m in described.output],
        "stateSchema": [_schema(m) for m in described.state],
        "mlProgramOperationTypeHistogram": _histogram(function),
        "computePrecision": _compute_precision(function),
    }


def _availability(version: int) -> dict[str, str]:
    mac, ios, watch, vision = _AVAILABILITY.get(version, _AVAILABILITY[max(_AVAILABILITY)])
    return {"macOS": mac, "iOS": ios, "tvOS": ios, "macCatalyst": ios, "watchOS": watch, "visionOS": vision}


def _schema(message: Any) -> dict[str, str]:
    kind = message.type.WhichOneof("Type")
    base = {
        "name": message.name,
        "shortDescription": message.shortDescription,
        "isOptional": str(int(message.type.isOptional)),
    }
    if kind not in ("multiArrayType", "stateType"):
        return base | {"type": {"imageType": "Image", "stringType": "String"}.get(kind, "Dictionary")}
    feature = feature_of(message)
    dtype = _ARRAY_NAMES.get(feature.dtype, feature.dtype)
    title = "State" if kind == "stateType" else "MultiArray"
    return base | {
        "type": title,
        "dataType": dtype,
        "shape": str(list(feature.shape)),
        "formattedType": f"{title} ({dtype}{_times(feature.shape)})",
        **_flexibility(feature),
    }


def _times(shape: Sequence[int]) -> str:
    return " " + " × ".join(str(n) for n in shape) if shape else ""


def _flexibility(feature: Feature) -> dict[str, str]:
    if feature.ranges:
        bounds = [[low, -1 if high is None else high] for low, high in feature.ranges]
        parts = [str(low) if low == high else f"{low}...{'' if high is None else high}" for low, high in feature.ranges]
        return {"hasShapeFlexibility": "1", "shapeFlexibility": " × ".join(parts), "shapeRange": str(bounds)}
    if feature.choices:
        shapes = [list(shape) for shape in feature.choices]
        parts = [" × ".join(str(n) for n in shape) for shape in shapes]
        return {"hasShapeFlexibility": "1", "shapeFlexibility": " | ".join(parts), "enumeratedShapes": str(shapes)}
    return {"hasShapeFlexibility": "0"}


def _histogram(function: Function) -> dict[str, int]:
    prefix = _PREFIXES.get(function.opset)
    counts = Counter(op.kind for op in function.block.walk() if op.kind != "const")
    return {_histogram_name(kind, prefix): count for kind, count in sorted(counts.items())}


def _histogram_name(kind: str, prefix: str | None) -> str:
    """Return an operation's name with the operation set that last defined it anew, as far as public bundles show."""
    camel = "".join(word[:1].upper() + word[1:] for word in kind.split("_"))
    if prefix is None or kind in _SINCE_IOS15 or (prefix == "Ios16" and kind in _SINCE_IOS17):
        return camel
    if prefix == "Ios17" and (kind in _ONLY_IOS16 or kind.startswith("constexpr_")):
        prefix = "Ios16"
    return f"{prefix}.{camel[:1].lower()}{camel[1:]}"


def _compute_precision(function: Function) -> str:
    kinds = {t.dtype for op in function.block.walk() for t in _types(op)}
    return _mixed([_ARRAY_NAMES[d] for d in ("fp16", "fp32", "int32") if d in kinds])


def _types(op: Op) -> Iterator[TensorType]:
    for out in op.outputs:
        if isinstance(out.type, TensorType):
            yield out.type


def _mixed(names: Sequence[str]) -> str:
    unique = sorted(set(names))
    return unique[0] if len(unique) == 1 else f"Mixed ({', '.join(unique)})" if unique else ""


def _storage_precision(function: Function) -> str:
    """Return what the weight files hold: types of constants, and how they are compressed."""
    names: list[str] = []
    for op in function.block.walk():
        stored = [
            v for v in [*op.attributes.values(), *(b for bound in op.inputs.values() for b in bound)] if _in_file(v)
        ]
        if not stored:
            continue
        if op.kind.startswith("constexpr_lut"):
            names.append(_palettized(op))
        elif op.kind.startswith("constexpr_sparse"):
            names.append("Sparse")
        elif "quantized_data" in op.attributes or "data" in op.inputs:
            data = op.attributes.get("quantized_data") or op.inputs["data"][0]
            names.append(_storage_name(data))
        else:
            names.extend(_storage_name(v) for v in stored)
    return _mixed(names)


def _in_file(value: Any) -> bool:
    return isinstance(value, Value) and isinstance(value.data, Blob)


def _storage_name(value: Any) -> str:
    dtype = value.type.dtype if isinstance(value, Value) and isinstance(value.type, TensorType) else "fp16"
    return _ARRAY_NAMES.get(dtype, dtype[:2].upper() + dtype[2:] if dtype.startswith("u") else dtype.capitalize())


def _palettized(op: Op) -> str:
    """Return a palettized weight's name, from the width of its indices or otherwise the size of its table, if known."""
    for argument in ("indices", "indices_nonzero_data"):
        kind = _literal_type(op, argument)
        if kind is not None and op.inputs:
            return f"Palettized ({BY_NAME[kind.dtype].bits} bits)"
    table = _literal_type(op, "lut")
    if table is None:
        return "Palettized"
    entries = table.shape[-2] if op.inputs else table.shape[-1]  # iOS18's table holds vectors
    return f"Palettized ({max(int(entries or 1).bit_length() - 1, 1)} bits)"


def _literal_type(op: Op, argument: str) -> TensorType | None:
    value = op.attributes.get(argument) or next(iter(op.inputs.get(argument, ())), None)
    return value.type if isinstance(value, Value) and isinstance(value.type, TensorType) else None
