"""Small checkpoints for the tests."""

import json
from functools import cache

import numpy as np
from safetensors.numpy import save


def index_of(weight_map: dict[str, str]) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


@cache
def _weights() -> tuple[bytes, bytes]:
    # No multiple of any power of two, so that the last chunk of a tensor is a short one.
    draw = np.random.default_rng(0)
    first = {"a": draw.standard_normal((300, 401), np.float32), "b": np.ones(7, np.float16)}
    return save(first), save({"c": draw.standard_normal((30, 40), np.float32)})


def two_file_checkpoint() -> dict[str, bytes]:
    """A checkpoint of three tensors in two files (480 kB and 5 kB) with an index, config and tokenizer."""
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    first, second = _weights()
    return {
        "config.json": b'{"model_type": "phi3"}',
        "tokenizer.json": b'{"version": "1.0"}',
        "vocab.json": b"{}",
        "merges.txt": b"#version: 0.2\n",
        "model.safetensors.index.json": index_of({"a": one, "b": one, "c": two}),
        one: first,
        two: second,
    }
