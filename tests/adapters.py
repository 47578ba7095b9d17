"""Builds whose programs take adapters, adapters that PEFT writes, and transformers' models with these adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import templates
import tiny
import torch
from models import tiny_families
from peft import LoraConfig, PeftModel, get_peft_model

from shardmill.checkpoint.hashing import tree_hashes
from shardmill.convert.stamped import convert_stamped
from shardmill.files import write_json
from shardmill.gates.weights import PackageWeights
from shardmill.runtime.kv import Floats
from shardmill.runtime.manifest import runtime_manifest

MLPS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3")
FIXED = {"shapes": "fixed", "adapters": 8}


def build(folder: Path, family: str, program: Mapping[str, Any] = FIXED, form: str = "fp16", **changes: Any) -> Path:
    """A build's folder with packages, host's table, texts and model.json; `changes` go into the config."""
    known = tiny.write_checkpoint if family == "phi3" else lambda where: tiny_families.write_tiny(family, where)
    source = tiny.fetched(known(folder / "checkpoint"), folder / "source")
    settings = {"topology": "auto", "head": {"slices": 1}} | changes
    parts, plan = tiny.split(source, program=dict(program), **settings)
    programs = {}
    for name, part in parts.items():
        if part.kind != "embedding":
            package = folder / f"packages/{name}.mlpackage"
            package.parent.mkdir(exist_ok=True)
            convert_stamped(part, source, form, package, templates.FOLDER)
            programs[name] = {"path": f"packages/{name}.mlpackage", "files": tree_hashes(package)[1]}
    tiny.write_table(parts["embedding"], source, folder / "embedding.safetensors")
    content = runtime_manifest(plan, programs, {"path": "embedding.safetensors"}) | {
        "packages": programs,
        "tokenizer": {"path": "source/tokenizer.json"},
        "texts": {"path": "source", "files": {}},
        "source": {"repo": None, "commit": None},
    }
    write_json(folder / "model.json", content)
    return folder


def write_lora(source: Path, folder: Path, seed: int = 0, size: float = 0.125, **options: Any) -> Path:
    """An adapter of a checkpoint with random matrices, as PEFT saves it; fp16 holds each of its numbers."""
    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options
    model = get_peft_model(tiny.transformers_model(source), LoraConfig(**chosen))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_((torch.randn(weight.shape, generator=generator) * size).half().float())
    model.save_pretrained(str(folder))
    return folder


def merged(source: Path, lora: Path, base: Any = None) -> Any:
    """transformers' model in fp32, or `base`, with an adapter in its weights, by PEFT."""
    model = tiny.transformers_model(source) if base is None else base
    return PeftModel.from_pretrained(model, str(lora)).merge_and_unload().eval()


def as_held(build: Path, program: Mapping[str, Any]) -> Any:
    """transformers' model with the packages' weights: fp16 does not hold each sum of a norm's weight and 1."""
    model = tiny.transformers_model(build / "source")
    parts, _ = tiny.split(build / "source", program=dict(program), topology="auto", head={"slices": 1})
    parameters = dict(model.named_parameters())
    for part in (one for one in parts.values() if one.kind != "embedding"):
        stored = PackageWeights(build / f"packages/{part.name}.mlpackage", part)
        for name in {tensor.source.tensor for tensor in part.tensors} & parameters.keys():
            parameters[name].data.copy_(stored(name))
    return model


def as_batch(tokens: Sequence[int]) -> torch.Tensor:
    """A text as transformers takes it."""
    return torch.tensor([list(tokens)])


def logits_of(model: Any, tokens: Sequence[int]) -> Floats:
    """transformers' logits [n, vocab]."""
    with torch.no_grad():
        found: Floats = model(as_batch(tokens), use_cache=False).logits[0].float().numpy()
    return found


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that transformers says after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_of(model, tokens)[-1])))
    return tokens[len(prompt) :]


def targets(source: Path, *names: str) -> list[str]:
    """The modules of a checkpoint's attention and MLPs that have these names, as target_modules take them."""
    modules = [name for name, module in tiny.transformers_model(source).named_modules() if not [*module.children()]]
    return [one for one in modules if one.rpartition(".")[2] in names and ".conv." not in one and "experts" not in one]
