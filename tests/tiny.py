"""A small Phi-3 checkpoint in which everything a program could get wrong matters, and a build of it.

Four layers of width 96, three query heads on one key/value head, partial rotary (24 of 32 dimensions), LongRoPE with
an attention factor of 1.2, norms away from one, and weights large enough that attention is far from uniform.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmill import config, plan
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.fetch import fetch

HIDDEN, LAYERS, HEADS, HEAD_DIM, ROPE_DIM, VOCAB, FFN = 96, 4, 3, 32, 24, 256, 128
CONTEXT, ORIGINAL, LONGEST = 64, 64, 384
TOPOLOGY = [[0, 2], [2, 3], [3, 4]]
SHORT = [1 + 0.05 * i for i in range(ROPE_DIM // 2)]
LONG = [1 + 0.5 * i for i in range(ROPE_DIM // 2)]


@dataclass(frozen=True)
class Build:
    """What split and convert made of a checkpoint."""

    source: Path
    parts: Mapping[str, plan.Part]
    plan: Mapping[str, Any]
    packages: Mapping[str, Path]
    table: Path  # embedding.safetensors
    text: Sequence[int]  # tokens to feed

    def layers(self) -> list[plan.Part]:
        """The parts that hold layers, in order."""
        return [part for part in self.parts.values() if part.kind == "layers" and not part.drafter]

    def heads(self) -> list[plan.Part]:
        """The parts that hold the LM head, in order."""
        return [part for part in self.parts.values() if part.kind == "head" and not part.drafter]


def hf_config(layers: int = LAYERS, tied: bool = True, original: int = ORIGINAL) -> Any:
    """transformers' config of the checkpoint."""
    from transformers import Phi3Config

    return Phi3Config(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=original,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": ROPE_DIM / HEAD_DIM,
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": original,
        },
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        sliding_window=None,
    )


def write_checkpoint(folder: Path, *, layers: int = LAYERS, tied: bool = True, original: int = ORIGINAL) -> Path:
    """Writes config, bf16 weights in several files and a tokenizer. The same arguments give the same weights."""
    from transformers import Phi3ForCausalLM

    torch.manual_seed(7)
    model = Phi3ForCausalLM(hf_config(layers, tied, original))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(drawn(name, weight))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def drawn(name: str, weight: Tensor) -> Tensor:
    """Values with which attention is peaked and a layer adds as much as it gets; uniform, so that INT8 costs little."""
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(sum(name.encode()))) * 2 - 1
    noise *= 3**0.5  # unit variance
    if "norm" in name:
        return 1 + 0.3 * noise
    gain = {"embed_tokens": 0.2, "lm_head": 0.2, "qkv_proj": 1.3, "o_proj": 0.7, "gate_up": 1.0, "down_proj": 0.7}
    key, factor = next((key, value) for key, value in gain.items() if key in name)
    return factor * noise if key in ("embed_tokens", "lm_head") else factor * noise / weight.shape[1] ** 0.5


def train_tokenizer() -> Any:
    """A byte-level BPE of 256 tokens, trained on a standard-library module."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator([sample_text()], trainer)
    return tokenizer


def sample_text() -> str:
    """Text that every Python has."""
    return Path(json.__file__).read_text(encoding="utf-8")


def settings(path: str, **changes: Any) -> dict[str, Any]:
    """A config file's content."""
    content = {
        "model": "tiny",
        "source": {"path": path},
        "context": CONTEXT,
        "topology": TOPOLOGY,
        "tokens": {"max": 4},
        "head": {"slices": 2},
    }
    return content | changes


def fetched(checkpoint: Path, dest: Path) -> Path:
    """The checkpoint as the fetch step lays it down, with source.json."""
    fetch(path=checkpoint, repo=None, revision=None, dest=dest, cache=None)
    return dest


def split(source: Path, **changes: Any) -> tuple[dict[str, plan.Part], dict[str, Any]]:
    """Parts by name and plan.json's content."""
    from shardmill.pipeline.steps.split import split

    files = json.loads((source / "source.json").read_text())["files"]
    parts, content = split(
        source, config.parse(settings(str(source), **changes)), HashCache(source.parent / "hashes"), files
    )
    return {part.name: part for part in parts}, content


def convert(part: plan.Part, source: Path, path: Path, quantization: str = "int8") -> Path:
    """The canonical package of a part."""
    import templates

    from shardmill.convert.stamped import convert_stamped

    convert_stamped(part, source, quantization, path, templates.FOLDER)
    return path


def write_table(part: plan.Part, source: Path, path: Path) -> Path:
    """embedding.safetensors."""
    from safetensors.torch import save_file

    from shardmill.convert.weights import PartWeights

    save_file({name: values.half() for name, values in PartWeights(part, source).items()}, path)
    return path


def build(folder: Path, *, tied: bool = True, known: Mapping[str, Path] | None = None) -> Build:
    """Writes, splits and converts a checkpoint; packages in `known` are taken as they are."""
    return converted(fetched(write_checkpoint(folder / "checkpoint", tied=tied), folder / "source"), folder, known)


def build_with_head(
    folder: Path, quantization: str = "int8", written: dict[str, Any] | None = None, **changes: Any
) -> Build:
    """A build whose config names the checkpoint of an EAGLE-3 head, see heads.py; `changes` go into the config.

    `written` is the head's config.json, if not the usual one.
    """
    import heads

    source = fetched(write_checkpoint(folder / "checkpoint"), folder / "source")
    fetched(heads.write_head(folder / "head", written), source / "drafter")
    return converted(source, folder, quantization=quantization, drafter={"path": str(folder / "head")}, **changes)


def converted(
    source: Path, folder: Path, known: Mapping[str, Path] | None = None, quantization: str = "int8", **changes: Any
) -> Build:
    """Splits and converts a fetched checkpoint; `changes` go into the config."""
    parts, content = split(source, **changes)
    programs = {name: part for name, part in parts.items() if part.kind != "embedding"}
    packages = {
        name: (known or {}).get(name) or convert(part, source, folder / f"{name}.mlpackage", quantization)
        for name, part in programs.items()
    }
    table = write_table(parts["embedding"], source, folder / "embedding.safetensors")
    return Build(source, parts, content, packages, table, sampled_text(source))


def sampled_text(source: Path) -> list[int]:
    """Tokens that the model itself would say: on other text a random model's perplexity means nothing."""
    model = transformers_model(source)
    generator, tokens = torch.Generator().manual_seed(1), [5]
    with torch.no_grad():
        while len(tokens) < CONTEXT:
            likely = model(torch.tensor([tokens])).logits[0, -1].softmax(-1)
            tokens.append(int(torch.multinomial(likely, 1, generator=generator)))
    return tokens


def relabelled(build: Build, folder: Path, original: int) -> Build:
    """The same weights under a config whose original length is `original`; the packages stay as they are."""
    copied_checkpoint(build.source, folder / "checkpoint")
    hf_config(original=original).save_pretrained(folder / "checkpoint")
    source = fetched(folder / "checkpoint", folder / "source")
    parts, content = split(source)
    return Build(source, parts, content, build.packages, build.table, build.text)


def transformers_model(source: Path, weights: Mapping[str, Tensor] | None = None) -> Any:
    """transformers' model in fp32 with eager attention; `weights` replace the checkpoint's, and untie the head."""
    from transformers import AutoConfig

    auto = auto_class(AutoConfig.from_pretrained(source))
    model = auto.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    if weights is not None:
        model.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"])  # no longer the embedding table
        model.load_state_dict(dict(weights), assign=True)
    return model


def auto_class(config: Any) -> Any:
    """Return transformers' auto class that makes a decoder of a config; some multimodal models have another one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM


def dequantised(build: Build) -> dict[str, Tensor]:
    """A state dict of the packages' weights, by int8 value times scale, and of the embedding table."""
    from safetensors.torch import load_file

    weights = {"model.embed_tokens.weight": load_file(build.table)["embedding"].float()}
    rows = []
    for part in (*build.layers(), *build.heads()):
        stored = constants(build.packages[part.name])
        if part.kind == "head":
            weights["model.norm.weight"] = stored["norm_weight"].flatten()
            rows.append(stored["lm_head_weight"].flatten(1))
        else:
            for tensor in part.tensors:
                weights[tensor.source.tensor] = stored[tensor.path.replace(".", "_")].reshape(tensor.stored)
    return weights | {"lm_head.weight": torch.cat(rows)}


def constants(package: Path) -> dict[str, Tensor]:
    """The constants of a package in fp32, dequantised, by name without coremltools' suffixes."""
    from coremltools.converters.mil.frontend.milproto.load import load
    from coremltools.models.utils import load_spec

    spec, weights = load_spec(str(package)), package / "Data/com.apple.CoreML/weights"
    program = load(spec, specification_version=spec.specificationVersion, file_weights_dir=str(weights))
    found = {}
    for op in program.functions["main"].operations:
        name = op.outputs[0].name.removesuffix("_quantized").removesuffix("_to_fp16")
        if op.op_type == "constexpr_blockwise_shift_scale":
            found[name] = torch.from_numpy(op.data.val.astype("float32") * op.scale.val.astype("float32"))
        elif op.op_type == "const" and getattr(op.outputs[0].val, "ndim", 0):
            found[name] = torch.from_numpy(op.outputs[0].val.astype("float32"))
    return found


def copied_checkpoint(source: Path, folder: Path) -> Path:
    """A fetched checkpoint as a folder of its own, which a test may spoil."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("source.json"))
    return folder
