"""From a config to a description: what has no place in the programs is refused by name, whatever it is called."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from shardmill import plan
from shardmill.errors import CheckpointError
from shardmill.models import family, supported
from shardmill.models.architecture import (
    LOCAL_ROPE,
    MASK,
    SLIDING_MASK,
    LayerSpec,
    TensorSource,
    name_in_tower,
    name_under,
)
from shardmill.models.decoder import IDLE, READ, decoder, is_neutral, kinds_by_type, refuse_unplaced, sliding_kind

from .small_configs import FAMILIES, small_config


class Config:
    """What refuse_unplaced asks of a config."""

    model_type = "llama"

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


@pytest.mark.parametrize("value", [True, 2, -1, 0.5, 1.01, "gelu", [0], {"a": 1}, (1,), float("nan")])
def test_an_unknown_field_is_refused_by_name_and_value(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse_unplaced(Config(hidden_size=8, use_something=value), ())
    line = str(caught.value)
    assert line == f"config.json: use_something is {value!r}: llama programs have no place for it"


@pytest.mark.parametrize("value", [None, False, 0, 0.0, 1, 1.0, "", [], {}, ()])
def test_a_field_at_a_neutral_value_changes_nothing(value: Any) -> None:
    assert is_neutral(value)
    refuse_unplaced(Config(use_something=value), ())


def test_true_is_not_the_neutral_factor_one() -> None:
    """Python says True == 1.0; a switch that is on is not a factor of one."""
    assert is_neutral(1.0) and not is_neutral(True)


def test_what_is_read_and_what_is_idle_may_have_any_value() -> None:
    refuse_unplaced(Config(**dict.fromkeys(READ | IDLE, "any"), _name_or_path="x", unsloth_fixed=True), ())
    refuse_unplaced(Config(window=7), ("window",))
    with pytest.raises(CheckpointError, match="window is 7"):
        refuse_unplaced(Config(window=7), ("windows",))
    refuse_unplaced(Config(hidden_dropout_prob=0.1, decoder_start_token_id=5), ())
    refuse_unplaced(Config(finetuning_task="ner", output_past=True), ())  # of BERT checkpoints


def test_layers_that_are_all_full_attention_are_no_kinds_of_layers() -> None:
    refuse_unplaced(Config(layer_types=["full_attention"] * 2), ())
    with pytest.raises(CheckpointError, match="layer_types is "):
        refuse_unplaced(Config(layer_types=["full_attention", "sliding_attention"]), ())


def test_no_field_is_called_both_read_and_idle() -> None:
    assert not READ & IDLE


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_refuses_an_unknown_field(model_type: str) -> None:
    family(model_type).describe(small_config(model_type), 64)
    with pytest.raises(CheckpointError, match=rf"num_pillars is 8: {model_type} programs have no place for it"):
        family(model_type).describe(small_config(model_type, num_pillars=8), 64)


BUILDABLE: dict[str, dict[str, Any]] = {  # where transformers has no default, or defaults that are refused
    "lfm2_moe": {"num_hidden_layers": 1, "layer_types": ["conv"]},
    "granitemoehybrid": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_local_experts": 0},
    "nemotron_h": {"layers_block_type": ["linear_attention"]},
}


@pytest.mark.parametrize("model_type", supported())
def test_transformers_own_defaults_have_a_place(model_type: str) -> None:
    """So a new default of a new release is seen."""
    config = AutoConfig.for_model(model_type, **BUILDABLE.get(model_type, {})).get_text_config()
    found = family(model_type).describe(config, 64).architecture
    assert (found.model_type, found.layers) == (config.model_type, config.num_hidden_layers)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tensors_are_those_of_transformers(model_type: str) -> None:
    """Every constant comes from a tensor of the model; a tied head and numbers without axes are the only others."""
    config = small_config(model_type)
    state = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    found = family(model_type).describe(config, 64)
    without = {*found.ignored, *found.fixed}
    assert plan.tensor_shapes(found) == {name: shape for name, shape in state.items() if name not in without}
    assert set(found.ignored) == ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert all(state[name] == () for name in found.fixed)


def described(**options: Any) -> Any:
    return decoder(small_config("llama"), 64, ("attention_bias", "mlp_bias"), **options)


def test_a_tied_head_is_the_table_and_a_copy_of_it_is_ignored() -> None:
    untied, tied = (
        decoder(small_config("llama", tie_word_embeddings=t), 64, ("attention_bias", "mlp_bias")) for t in (False, True)
    )
    assert untied.sources["lm_head.weight"] == TensorSource("lm_head.weight") and untied.ignored == ()
    assert tied.sources["lm_head.weight"] == TensorSource("model.embed_tokens.weight")
    assert tied.ignored == ("lm_head.weight",)


def test_the_embedding_s_scale_holds_the_stream_s_and_the_head_has_neither() -> None:
    found = described(embedding_scale=12.0, stream_scale=0.125)
    assert found.architecture.embedding_scale == 1.5
    assert found.sources["embedding"] == TensorSource("model.embed_tokens.weight", times=1.5)
    assert found.sources["lm_head.weight"].times == 1.0
    assert found.architecture.graph.stream_eps == found.architecture.graph.rms_norm_eps / 64


def test_names_get_the_prefix_of_the_checkpoint() -> None:
    norm = {"input_layernorm.weight": TensorSource("other.weight", add=1.0)}
    found = described(tensors=norm, final_norm="last.weight").under("language_model.model.")
    assert found.sources["layers.3.input_layernorm.weight"] == TensorSource(
        "language_model.model.layers.3.other.weight", 1.0
    )
    assert found.sources["layers.0.mlp.up_proj.weight"].tensor == "language_model.model.layers.0.mlp.up_proj.weight"
    assert found.sources["norm.weight"].tensor == "language_model.model.last.weight"
    assert found.sources["lm_head.weight"].tensor == "language_model.lm_head.weight"
    assert found.prefix == "language_model.model."


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.text.model.", "model.text.lm_head.weight"),
    ],
)
def test_a_checkpoint_s_names_lead_back_to_those_of_transformers(prefix: str, head: str) -> None:
    """The head lies beside the module that has the decoder, as transformers' own renamings of such checkpoints say."""
    untied, tied = (
        family("llama").describe(small_config("llama", tie_word_embeddings=is_tied), 64) for is_tied in (False, True)
    )
    for name, moved in {"lm_head.weight": head, "model.norm.weight": f"{prefix}norm.weight"}.items():
        assert (name_under(prefix, name), name_in_tower(prefix, moved)) == (moved, name)
    assert untied.under(prefix).sources["lm_head.weight"] == TensorSource(head)
    assert tied.under(prefix).ignored == (head,)
    assert untied.under(prefix).under("model.") == untied


def test_a_window_counts_where_it_is_narrower_than_the_context() -> None:
    assert [sliding_kind(64, window).mask for window in (None, 63, 64, 65)] == [MASK, SLIDING_MASK, MASK, MASK]
    with pytest.raises(CheckpointError, match="sliding_window is 0: no token would see any"):
        sliding_kind(64, 0)
    assert sliding_kind(64, 8, rope=None) == LayerSpec(rope=None, mask=SLIDING_MASK)
    assert described(window=8).architecture.window is None  # no layer slides
    assert described(window=8, kinds=[LayerSpec(mask=SLIDING_MASK), *[LayerSpec()] * 3]).architecture.window == 8


def test_layer_types_are_kinds() -> None:
    found = kinds_by_type(["sliding_attention", "full_attention"], 64, 8, sliding_rope=LOCAL_ROPE)
    assert found == (LayerSpec(rope=LOCAL_ROPE, mask=SLIDING_MASK), LayerSpec())
    with pytest.raises(CheckpointError, match="layer_types: 'chunked_attention': programs have full_attention and"):
        kinds_by_type(["full_attention", "chunked_attention"], 64, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': programs have gelu_pytorch_tanh, relu2, silu, swish only"),
        ({"max_position_embeddings": 63}, "context 64 is over the model's 63 positions"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 key/value heads"),
    ],
)
def test_what_the_graph_has_no_place_for_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family("llama").describe(small_config("llama", **change), 64)


def test_a_config_that_names_no_limit_of_positions_has_none() -> None:
    """As RecurrentGemma's."""
    config = small_config("llama")
    vars(config)["max_position_embeddings"] = None
    assert family("llama").describe(config, 100_000).architecture.layers == config.num_hidden_layers


def test_heads_that_are_narrower_than_what_turns_are_refused() -> None:
    from shardmill.models.architecture import Rope

    with pytest.raises(CheckpointError, match="turn 34 dimensions of heads that have 32"):
        described(ropes={"rope": Rope((1.0,) * 17, 1.0, "default")})


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("lfm2", {"conv_bias": True}, "conv_bias is true"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic but without",
        ),
    ],
)
def test_a_family_refuses_what_only_it_knows(model_type: str, change: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(model_type, **change)
    with pytest.raises(CheckpointError, match=message):
        family(model_type).describe(config, 64)
