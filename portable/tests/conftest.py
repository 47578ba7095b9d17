"""Shared by the portable engine's tests: the installed engine, and small programs to run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import portable_coreml
import pytest
import torch
from limits import pytest_collection_modifyitems as pytest_collection_modifyitems

GOLDENS = next(
    (path for up in Path(__file__).resolve().parents if (path := up / "shared/goldens/apple-compiled").is_dir()),
    Path("shared/goldens/apple-compiled"),
)  # bundles that Apple's compiler made, beside the repository where there are any
PATIENCE = 600.0  # seconds; it ends what hangs, and no machine is so busy that it ends anything else


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Keep the garbage collector from what earlier files left, which each conversion of coremltools would search."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """The portable engine in fp32 mode; on a Mac, where it does not install itself, these tests have no subject."""
    if not portable_coreml.install("fp32"):
        pytest.skip("Core ML is present: the portable engine does not install itself")
    yield
    portable_coreml.install("fp32")


class CachedAttention(torch.nn.Module):
    """One head of attention over a masked cache, the graph contract in small: x [1, d, T, 1] -> [1, d, T, 1]."""

    def __init__(self, width: int = 32, slots: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Conv2d(width, width, 1, bias=False) for _ in range(4))
        self.register_buffer("cache_k", torch.zeros(1, 1, slots, width))
        self.register_buffer("cache_v", torch.zeros(1, 1, slots, width))

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        rows = [conv(x).squeeze(-1).transpose(1, 2).unsqueeze(1) for conv in (self.q, self.k, self.v)]  # [1, 1, T, d]
        keep = 1 - write.sum(-1, keepdim=True)  # [1, 1, S, 1]
        self.cache_k.copy_(self.cache_k * keep + write @ rows[1])
        self.cache_v.copy_(self.cache_v * keep + write @ rows[2])
        weights = torch.softmax(rows[0] @ self.cache_k.transpose(-1, -2) * 0.25 + attn_mask, -1)
        mixed = (weights @ self.cache_v).squeeze(1).transpose(1, 2).unsqueeze(-1)
        return x + self.o(mixed)


def step_inputs(width: int, slots: int, first: int, tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs of CachedAttention for `tokens` tokens written to the slots from `first` on."""
    rng = np.random.default_rng(seed)
    mask = np.full((1, 1, tokens, slots), -1e4, np.float32)
    write = np.zeros((1, 1, slots, tokens), np.float32)
    for token in range(tokens):
        mask[0, 0, token, : first + token + 1] = 0
        write[0, 0, first + token, token] = 1
    x = rng.standard_normal((1, width, tokens, 1)).astype(np.float16).astype(np.float32)
    return {"x": x, "attn_mask": mask, "write": write}


def convert_attention(module: CachedAttention) -> Any:
    """CachedAttention as a stateful ML Program with T in 1..4 on every input."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol, types

    slots, width = module.cache_k.shape[-2:]
    weights = {name: p.detach().numpy().astype(np.float16) for name, p in module.named_parameters()}
    symbol = get_new_symbol()
    inputs = [(1, width, symbol, 1), (1, 1, symbol, slots), (1, 1, slots, symbol)]
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in inputs]
    specs += [mb.StateTensorSpec((1, 1, slots, width), dtype=types.fp16) for _ in range(2)]

    def program(x: Any, attn_mask: Any, write: Any, cache_k: Any, cache_v: Any) -> Any:
        def project(name: str) -> Any:
            flat = mb.squeeze(x=mb.conv(x=x, weight=weights[f"{name}.weight"]), axes=[3])
            return mb.expand_dims(x=mb.transpose(x=flat, perm=[0, 2, 1]), axes=[1])  # [1, 1, T, d]

        keep = mb.sub(x=np.float16(1), y=mb.reduce_sum(x=write, axes=[-1], keep_dims=True))  # [1, 1, S, 1]
        caches = []
        for state, name in ((cache_k, "k"), (cache_v, "v")):
            kept = mb.mul(x=mb.read_state(input=state), y=keep)
            value = mb.add(x=kept, y=mb.matmul(x=write, y=project(name)))
            caches.append(mb.coreml_update_state(state=state, value=value))
        scores = mb.mul(x=mb.matmul(x=project("q"), y=caches[0], transpose_y=True), y=np.float16(0.25))
        mixed = mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=attn_mask), axis=-1), y=caches[1])
        columns = mb.expand_dims(x=mb.transpose(x=mb.squeeze(x=mixed, axes=[1]), perm=[0, 2, 1]), axes=[3])
        return mb.add(x=x, y=mb.conv(x=columns, weight=weights["o.weight"]), name="hidden")

    tokens = ct.RangeDim(1, 4, default=1)
    shapes = {"x": (1, width, tokens, 1), "attn_mask": (1, 1, tokens, slots), "write": (1, 1, slots, tokens)}
    return ct.convert(
        mb.program(input_specs=specs, opset_version=ct.target.iOS18)(program),
        convert_to="mlprogram",
        inputs=[ct.TensorType(name, shape, np.float16) for name, shape in shapes.items()],
        minimum_deployment_target=ct.target.iOS18,
    )


@pytest.fixture(scope="session")
def attention() -> CachedAttention:
    """A small attention layer with weights that fp16 holds exactly."""
    torch.manual_seed(0)
    module = CachedAttention().eval()
    for parameter in module.parameters():
        parameter.data = parameter.data.half().float()
    return module


@pytest.fixture(scope="session")
def attention_package(attention: CachedAttention, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of that layer."""
    portable_coreml.install("fp32")
    path = tmp_path_factory.mktemp("attention") / "attention.mlpackage"
    convert_attention(attention).save(str(path))
    return path


@pytest.fixture
def build_program() -> Callable[..., Any]:
    """mb program -> MLModel: `build_program(function, {"x": shape}, **ct.convert arguments)`."""

    def build(function: Callable[..., Any], shapes: dict[str, tuple[int, ...]], **options: Any) -> Any:
        import coremltools as ct
        from coremltools.converters.mil import Builder as mb

        target = options.pop("minimum_deployment_target", ct.target.iOS17)
        specs = [mb.TensorSpec(shape=shape) for shape in shapes.values()]
        program = mb.program(input_specs=specs, opset_version=target)(function)
        options.setdefault("compute_precision", ct.precision.FLOAT32)
        return ct.convert(program, convert_to="mlprogram", minimum_deployment_target=target, **options)

    return build
