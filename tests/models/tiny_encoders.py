"""A tiny config for every encoder, and models and checkpoints of them whose every constant matters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardmill import models
from shardmill.files import write_json
from shardmill.models.architecture import ModelDescription, blocks
from shardmill.models.part_kinds import constants, inputs, table_constants, whole_spec
from shardmill.models.parts import build
from shardmill.models.sources import assembled, turned
from shardmill.runtime.kv import Floats
from shardmill.runtime.pack import apart, columns, encoder_arrays

VOCAB, TEXT = 384, 40
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
TYPES = ["person", "email", "phone"]
LABELS = ["O", *(f"{place}-{name}" for name in TYPES for place in "BIES")]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.125,
}
YARN = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 64}
# The last layer must be a full one.
EMBEDDING_GEMMA2: dict[str, Any] = {
    **{"num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1},
    **{"hidden_size_per_layer_input": 16, "embedding_dim": 72, "rms_norm_eps": 1e-3, "sliding_window": 4},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
VISION = {"model_type": "gemma4_vision", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2} | {
    **{"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "patch_size": 2, "position_embedding_size": 4},
}
TINY: dict[str, dict[str, Any]] = {
    "bert": BASE | {"layer_norm_eps": 1e-3},  # large enough to show
    "modernbert": BASE
    | {"local_attention": 8, "norm_eps": 1e-3, "norm_bias": True, "attention_bias": True, "mlp_bias": True}
    | {"classifier_bias": True, "cls_token_id": 1, "sep_token_id": 2},
    "openai_privacy_filter": BASE
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32}
    | {"num_local_experts": 48, "num_experts_per_tok": 3, "sliding_window": 4, "rms_norm_eps": 1e-3}
    | {"rope_parameters": YARN},
    "qwen3": BASE
    | {"num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}
    | {"use_sliding_window": True, "sliding_window": 8}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "gemma3_text": BASE
    | {"hidden_size": 96, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-3, "query_pre_attn_scalar": 24}
    | {"use_bidirectional_attention": True, "sliding_window": 9}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "embedding_gemma2": {"text_config": BASE | EMBEDDING_GEMMA2, "vision_config": VISION, "audio_config": None},
    "embedding_gemma2_text": BASE | EMBEDDING_GEMMA2,
}
HEADS = {
    "token-classification": ("ForTokenClassification", "AutoModelForTokenClassification"),
    "text-classification": ("ForSequenceClassification", "AutoModelForSequenceClassification"),
    "feature-extraction": ("Model", "AutoModel"),
    "text-ranking": ("ForCausalLM", "AutoModelForCausalLM"),
}
CLASSES = {
    "bert": "Bert",
    "modernbert": "ModernBert",
    "openai_privacy_filter": "OpenAIPrivacyFilter",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3Text",
    "embedding_gemma2": "EmbeddingGemma2",
    "embedding_gemma2_text": "EmbeddingGemma2Text",
}
EMBEDDING = ("qwen3", "gemma3_text", "embedding_gemma2", "embedding_gemma2_text")
ONLY = {"openai_privacy_filter": "token-classification"} | dict.fromkeys(EMBEDDING, "feature-extraction")
TASKS = [(name, task) for name in CLASSES for task in HEADS if ONLY.get(name, task) == task != "text-ranking"]


def tiny_config(model_type: str, task: str = "", **changes: Any) -> Any:
    """transformers' config of a tiny encoder, which labels tokens unless it has another task only."""
    from transformers import AutoConfig

    task = task or ONLY.get(model_type, "token-classification")
    labels = dict(enumerate(LABELS))
    named = {"id2label": labels, "label2id": {name: row for row, name in labels.items()}}
    content = TINY[model_type] | named | {"architectures": [CLASSES[model_type] + HEADS[task][0]]}
    return AutoConfig.for_model(model_type, **content | changes)


def tiny_model(model_type: str, task: str = "", **changes: Any) -> Any:
    """transformers' tiny encoder in fp32, the same for the same arguments."""
    import transformers

    task = task or ONLY.get(model_type, "token-classification")
    torch.manual_seed(0)
    maker = getattr(transformers, HEADS[task][1])
    config = tiny_config(model_type, task, **changes)
    model = maker.from_config(config, attn_implementation="eager").eval()
    model.config.architectures = config.architectures
    return drawn(model)


def drawn(model: Any) -> Any:
    """The model with every vector drawn: gains about 1, and biases about 0."""
    usual = 0.0 if model.config.model_type == "gemma3_text" else 1.0  # of a gain; Gemma adds 1 to it
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if (weight.ndim == 1 or "_bias" in name) and weight.is_floating_point():
                values = 0.3 * torch.randn(weight.shape, generator=generator)
                gain = "norm" in name.lower() and name.endswith("weight") or name.endswith("layer_scalar")
                weight.copy_(values + (usual if gain else 0.0))
                if "gemma2" in model.config.model_type and name.endswith(("q_norm.weight", "k_norm.weight")):
                    weight.sub_(0.7)  # scores are not divided, and large ones amplify rounding
    return model


def described(model: Any, length: int = 128) -> ModelDescription:
    """Our description of one of transformers' models, whose tensors are called as in its state dict."""
    config = model.config.get_text_config()
    found: ModelDescription = models.family(model.config.model_type, models.ENCODER).describe(config, length)
    return found.stored_as(model.state_dict())


class Blocks:
    """The PyTorch blocks of an encoder, called as a runtime calls its programs."""

    def __init__(self, model: ModelDescription, tensors: dict[str, Tensor]) -> None:
        self.a, spec = model.architecture, whole_spec(model.architecture)
        shapes = constants(spec)
        weights = {path: self.held(model, path, shape, tensors) for path, shape in shapes.items()}
        self.tables = {
            path: turned(tensors[s.tensor], s) for path in table_constants(self.a) for s in blocks(model.sources[path])
        }
        self.names, self.module = list(inputs(spec)), build(spec, weights)

    @staticmethod
    def held(model: ModelDescription, path: str, shape: tuple[int, ...], tensors: dict[str, Tensor]) -> Tensor:
        """A constant of its blocks."""
        found = []
        for source in blocks(model.sources[path]):
            stored = tensors[source.tensor] if source.index is None else tensors[source.tensor][source.index]
            found.append(turned(stored, source).float())
        return assembled(found, shape)

    def run(self, tokens: Sequence[int], bucket: int, noise: bool = False) -> Floats:
        """What comes out for each token, [n, labels or d]. Args: noise in the columns that no token fills."""
        (found,) = self.run_together([tokens], bucket, noise)
        return found

    @torch.no_grad()
    def run_together(self, texts: Sequence[Sequence[int]], bucket: int, noise: bool = False) -> list[Floats]:
        """`run` of texts that share a pass."""
        counts = [len(tokens) for tokens in texts]
        ropes = {name: {"inv_freq": r.inv_freq, "scale": r.scale} for name, r in self.a.ropes.items()}
        given = encoder_arrays({"rope": ropes, "band": self.a.band, "causal": self.a.causal}, bucket, counts)
        x = columns([self.embedded(tokens).numpy() for tokens in texts], bucket)
        if noise:
            rest = x[..., sum(counts) :, :]
            rest[:] = torch.randn(rest.shape).numpy()
        out = self.module(torch.from_numpy(x), *(torch.from_numpy(given[name]) for name in self.names[1:]))
        return apart(out[0, : self.a.ends.labels or None, :, 0].T.numpy(), counts)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The host's rows of a text."""
        rows = self.tables["embedding"][list(tokens)].float()
        return rows + self.tables["positions"][: len(tokens)] + self.tables["types"][0] if self.a.positions else rows


def tiny_text(length: int = TEXT) -> list[int]:
    """Tokens to feed."""
    return [int(t) for t in torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(2))]


@torch.no_grad()
def expected(model: Any, tokens: Sequence[int]) -> Floats:
    """What transformers makes of the tokens: logits of each, of the whole text, or hidden states of each."""
    result = model(input_ids=torch.tensor([list(tokens)]))
    out = result.logits if "logits" in result else result.last_hidden_state
    found: Floats = out[0].numpy()
    return found


def write_tiny(model_type: str, folder: Path, task: str = "", **changes: Any) -> Path:
    """A checkpoint of an encoder as the hub has it: bf16 that fp16 can hold, in several files, with a tokenizer."""
    model = tiny_model(model_type, task, **changes).to(torch.float16).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer().save_pretrained(folder)
    return folder


PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


def write_modules(
    folder: Path, pooling: str = "lasttoken", dense: Sequence[nn.Linear] = (), **prompts: Any
) -> Sequence[nn.Linear]:
    """Add what sentence-transformers writes beside a model.

    Args:
        folder: the checkpoint's.
        pooling: the name of the pooling.
        dense: projections; tanh follows all but the last.
        prompts: further content of config_sentence_transformers.json.
    """
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds) if place)]
    listed = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(folder / "modules.json", listed)
    write_json(
        folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None} | prompts
    )
    named = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    modes = {f"pooling_mode_{name}": pooling == mode for mode, name in named.items()}
    width = dense[0].in_features if dense else BASE["hidden_size"]
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": width, **modes, "include_prompt": True})
    for place, layer in enumerate(dense, 2):
        own = folder / f"{place}_Dense"
        own.mkdir()
        activation = "linear.Identity" if layer is dense[-1] else "activation.Tanh"
        content = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
        content["activation_function"] = f"torch.nn.modules.{activation}"
        write_json(own / "config.json", content)
        save_file({f"linear.{name}": held for name, held in layer.state_dict().items()}, own / "model.safetensors")
    return dense


@cache
def tokenizer() -> Any:
    """A byte-level BPE as transformers uses it, which puts [CLS] before a text and [SEP] after it."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(kinds.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([tiny.sample_text()], trainer)
    ends = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=10**6, **named)


def settings(source: Path, **changes: Any) -> dict[str, Any]:
    """A config file's content."""
    return {"model": "tiny", "source": {"path": str(source)}, "buckets": [16, 64]} | changes
