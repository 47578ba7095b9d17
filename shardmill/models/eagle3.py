"""An EAGLE-3 head as data: a checkpoint of one layer, which drafts for a model from three of its hidden states.

At position i the head gets what the model computed there, and the token t_(i+1). It predicts t_(i+2):

    f_i = fc [taps of position i], or in a draft's further steps the head's own output at i - 1
    z   = [input_layernorm(embedding of t_(i+1)); hidden_norm(f_i)]
    y   = f_i + attention(z)
    output = y + mlp(post_attention_layernorm(y))
    logits = lm_head(norm(output))

If `norm_before_residual` is set, y = hidden_norm(f_i) + attention(z). The three taps are the inputs of the model's
layers 2, n // 2 and n - 3, unless config.json lists others. The rows of lm_head are tokens of a smaller vocabulary: row
r is the model's token r + d2t[r]. The embedding is the model's.

Sources:

- SafeAILab/EAGLE, eagle/traineagle3/cnets.py at 9666a81: the layer, and the names of tensors.
- vLLM, vllm/model_executor/models/llama_eagle3.py at 583507d: layers.0 for midlayer, d2t, and that the next step reads
  the output before the last norm.
- SGLang, set_eagle3_layers_to_capture: `eagle_config` lists layers whose outputs are the taps.
- speculators, models/eagle3/{config,core,model_definitions}.py at 033c87f: a config.json with the layer's fields in
  `transformer_layer_config`, and `norm_before_residual`. vLLM, transformers_utils/configs/speculators/algos.py: such a
  config lists layers whose inputs are the taps, and sets `norm_before_residual` if it lacks the field.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import Architecture, LayerSpec, ModelDescription, Sources, TensorSource
from shardmill.models.decoder import attention_biases, decoder
from shardmill.models.hf_config import load_hf_config
from shardmill.models.layer_constants import layer_constants

EAGLE3 = "eagle3"
TAPS = 3
FOLDER = "drafter/"  # of its files beside the model's; begins the names of its tensors
TOKENS = "d2t"  # tensor: what is added to a row of lm_head to get the model's token
UNUSED = ("t2d", "embed_tokens.weight")  # the model's tokens that lm_head has, and a copy of the model's table
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
READ = (
    "attention_bias",
    "draft_vocab_size",
    "eagle_config",
    LAYER_IDS,
    "max_window_layers",  # which heads of Qwen3 have from their model's config, and no head reads
    "norm_before_residual",
    "target_hidden_size",
    "vocab_size",
)
NESTED = "transformer_layer_config"  # the layer's fields in a config of the speculators library
IDLE = (  # fields of a config of the speculators library that change no draft
    "architectures",
    "auto_map",
    "draft_attn_kernel",  # of training
    "dtype",
    "enable_sp_ulysses",
    "has_no_defaults_at_init",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "torch_dtype",
    "transformers_version",
)


@dataclass(frozen=True)
class DrafterDescription:
    """A head, an assistant (models/assistant.py) or an MTP layer (models/mtp.py), and what it reads of its model.

    Attributes:
        model: its layers, and its LM head over `architecture.vocab` tokens; names of tensors begin with FOLDER, but not
            the names of an MTP layer's.
        taps: the model's layers whose inputs it reads, in the order in which `fc` takes them; the number of layers
            stands for the last layer's output.
        mapped: whether its tokens have other numbers than the model's.
        kind: EAGLE3, ASSISTANT or MTP.
        lent: the model's layers whose caches it reads. Its own layers are numbered after the model's then.
        first: the kind and the rows of its first program, see GraphSpec.
    """

    model: ModelDescription
    taps: tuple[int, ...]
    mapped: bool
    kind: str = EAGLE3
    lent: tuple[tuple[int, LayerSpec], ...] = ()
    first: tuple[str, int] = ("fuse", TAPS)


def load_head_config(folder: Path) -> Any:
    """Return transformers' config of the head in a folder, whichever library wrote it. Raises CheckpointError."""
    from shardmill.files import load_json

    try:
        nested = NESTED in load_json(folder / "config.json")
    except (OSError, ValueError, TypeError):
        nested = False  # load_hf_config says what is wrong
    return load_hf_config(folder, _flattened if nested else None)


def _flattened(content: Any) -> Any:
    """Return a config of the speculators library with the layer's fields beside the head's. Raises ValueError."""
    layer = content[NESTED]
    if content.get("speculators_model_type") != EAGLE3:
        raise ValueError(f"speculators_model_type is {content.get('speculators_model_type')!r}, not {EAGLE3}")
    if not isinstance(layer, dict):
        raise ValueError(f"{NESTED} is {layer!r}: it must be the config of a layer")
    head_fields = {name: value for name, value in content.items() if name != NESTED and name not in IDLE}
    return {"model_type": "llama", **layer, "norm_before_residual": True, "tie_word_embeddings": False, **head_fields}


def describe(config: Any, tensors: Collection[str] | None, target: Architecture, context: int) -> DrafterDescription:
    """Return the description of a head for a model.

    Args:
        config: transformers' config of the head, of the type llama.
        tensors: the names of its checkpoint's tensors; None if only its config is there yet.
        target: its model.
        context: key/value slots of the programs.

    Raises:
        CheckpointError: it is no EAGLE-3 head, or another model's.
    """
    names = ("fc.weight",) if tensors is None else tensors
    if config.model_type != "llama" or config.num_hidden_layers != 1 or "fc.weight" not in names:
        raise CheckpointError("drafter: no EAGLE-3 head: that has a config of type llama, one layer, and fc.weight")
    rows = getattr(config, "draft_vocab_size", None) or config.vocab_size
    _check_target(config, rows, target)
    config = copy(config)
    config.max_position_embeddings = max(context, config.max_position_embeddings)  # a draft may be wrong anywhere
    kind = LayerSpec(paired=True, norm_before_residual=bool(getattr(config, "norm_before_residual", False)))
    described = decoder(config, context, READ, kinds=(kind,), **attention_biases(config)).architecture
    # The stream of a head is in the model's units, so what its branches add to the stream has them too.
    units = dict.fromkeys(("self_attn.o_proj.weight", "mlp.down_proj.weight"), target.graph.stream_scale)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    sources: dict[str, Sources] = {
        f"layers.0.{role}": TensorSource(FOLDER + prefix + role, times=units.get(role, 1.0))
        for role in layer_constants(described.graph, described.kinds[0])
    }
    sources |= {path: TensorSource(FOLDER + path) for path in ("fc.weight", "norm.weight", "lm_head.weight")}
    graph = replace(described.graph, stream_scale=target.graph.stream_scale)
    architecture = replace(described, model_type=EAGLE3, graph=graph, vocab=rows, tied=False)
    model = ModelDescription(architecture, sources, ignored=tuple(FOLDER + name for name in (TOKENS, *UNUSED)))
    return DrafterDescription(model, _tapped_layers(config, target.layers), rows < target.vocab or TOKENS in names)


def _check_target(config: Any, rows: int, target: Architecture) -> None:
    """Raise CheckpointError if a head of `rows` tokens does not fit the model."""
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    for what, ours, theirs in (
        ("hidden_size", config.hidden_size, target.graph.hidden),
        ("target_hidden_size", width, target.graph.hidden),
        ("vocab_size", config.vocab_size, target.vocab),
    ):
        if ours != theirs:
            raise CheckpointError(f"drafter: its {what} is {ours}, the model's {theirs}: it is another model's head")
    if rows > target.vocab:
        raise CheckpointError(f"drafter: draft_vocab_size {rows} is over the model's {target.vocab} tokens")


def _tapped_layers(config: Any, layers: int) -> tuple[int, ...]:
    """Return the layers of a model of `layers` layers whose inputs a head reads, in order.

    Raises CheckpointError for layers that the model lacks.
    """
    eagle_config = getattr(config, "eagle_config", None) or {}
    # vLLM's llama_eagle3.py reads it here too.
    if isinstance(eagle_config, dict) and eagle_config.get("norm_before_fc"):
        raise CheckpointError("drafter: eagle_config: norm_before_fc is True: programs have no norm before fc")
    if not isinstance(eagle_config, dict) or eagle_config.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"drafter: eagle_config is {eagle_config!r}: a head that reads {TAPS} hidden states is supported"
        )
    inputs, outputs = getattr(config, LAYER_IDS, None), eagle_config.get(LAYER_IDS)
    ids = outputs if inputs is None else inputs
    if ids is None:
        return default_taps(layers)
    first = 0 if inputs is None else 1
    if not isinstance(ids, list) or len(ids) != TAPS or not all(i in range(first, first + layers) for i in ids):
        raise CheckpointError(f"drafter: {LAYER_IDS} {ids}: the model has {layers} layers, and a head reads {TAPS}")
    return tuple(i + 1 - first for i in ids)


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads if its config names none."""
    return 2, layers // 2, layers - 3
