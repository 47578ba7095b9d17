"""What no encoder's program can be is refused by the field or key that says so, before any work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import encoders
import pytest
import tiny
import yaml
from typer.testing import CliRunner

from shardmill import cli, config
from shardmill.errors import ConfigError, ShardmillError
from shardmill.pipeline.preview import preview
from shardmill.pipeline.resolve import resolve_config

from . import tiny_encoders
from .tiny_configs import tiny_config

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another task": ("bert", {"architectures": ["BertForMaskedLM"]}, "architectures: 'BertForMaskedLM'"),
    "no task": ("bert", {"architectures": None}, "architectures: ''"),
    "relative positions": (
        "bert",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type 'relative_key'",
    ),
    "another activation": ("bert", {"hidden_act": "mish"}, "hidden_act 'mish': programs have"),
    "an unknown field": ("bert", {"adapter_width": 5}, "adapter_width is 5: bert programs have no place"),
    "a decoder": ("bert", {"is_decoder": True}, "is_decoder is True"),
    "pooling of all tokens": (
        "modernbert",
        {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean"},
        "classifier_pooling 'mean'",
    ),
    "a layer of another type": (
        "modernbert",
        {"layer_types": ["full_attention", "sliding_attention", "linear_attention"]},
        "layer_types: 'linear_attention'",
    ),
    "too few positions": ("modernbert", {"max_position_embeddings": 32}, "buckets.* 32 positions"),
    "a filter of texts": (
        "openai_privacy_filter",
        {"architectures": ["OpenAIPrivacyFilterForSequenceClassification"]},
        "only labels tokens",
    ),
    "several labels for one text": (
        "bert",
        {"architectures": ["BertForSequenceClassification"], "problem_type": "multi_label_classification"},
        "problem_type is 'multi_label_classification' with .* labels: programs give a text one label",
    ),
    "a number for a text": (
        "bert",
        {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}, "label2id": {"score": 0}},
        "with 1 labels",
    ),
    "a language model that classifies": (
        "qwen3",
        {"architectures": ["Qwen3ForSequenceClassification"]},
        r"architectures: 'Qwen3ForSequenceClassification': programs have \*ForCausalLM, \*Model only",
    ),
    "a Gemma that writes text": (
        "gemma3_text",
        {"use_bidirectional_attention": False},
        "use_bidirectional_attention is not true: a decoder; give `context`",
    ),
    "capped scores": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "capped logits": ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "an EmbeddingGemma 2 for another task": (
        "embedding_gemma2_text",
        {"architectures": ["EmbeddingGemma2ForSequenceClassification"]},
        r"architectures: 'EmbeddingGemma2ForSequenceClassification': programs have \*Model only",
    ),
    "no rows for layers": ("embedding_gemma2_text", {"hidden_size_per_layer_input": 0}, "per_layer_input is 0: it"),
    "no width of embeddings": ("embedding_gemma2_text", {"embedding_dim": 0}, "embedding_dim is 0: it must be 1 or"),
    "a band of nothing": ("embedding_gemma2_text", {"sliding_window": 0}, "sliding_window is 0: it must be 1 or more"),
    "layers that differ in more": (
        "embedding_gemma2_text",
        {"per_layer_config": {"1": {"intermediate_size": 32}}},
        "per_layer_config: intermediate_size: layers may differ in head_dim and num_key_value_heads only",
    ),
    "a layer without its MLP": (
        "embedding_gemma2_text",
        {"per_layer_config": {"1": {"skip": ["mlp"]}}},
        "per_layer_config: skip: layers may differ",
    ),
    "heads that don't fit in one layer": (
        "embedding_gemma2_text",
        {"per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 3}}},
        "4 heads are no multiple of 3 key/value heads",
    ),
    "a second table": (
        "embedding_gemma2_text",
        {"vocab_size_per_layer_input": 384},
        "vocab_size_per_layer_input is 384: embedding_gemma2_text programs have no place",
    ),
    "more experts than there are": ("openai_privacy_filter", {"num_experts_per_tok": 49}, "num_experts_per_tok 49"),
}


def write_config(folder: Path, content: dict[str, Any]) -> Path:
    """A checkpoint's folder that holds a config.json and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def plain(found: Any) -> dict[str, Any]:
    """A transformers config as config.json has it."""
    content: dict[str, Any] = json.loads(found.to_json_string(use_diff=False))
    return content


@pytest.mark.parametrize("name", REFUSED)
def test_plan_refuses_it_in_one_line(tmp_path: Path, name: str) -> None:
    model_type, changes, message = REFUSED[name]
    source = write_config(tmp_path / "checkpoint", plain(tiny_encoders.tiny_config(model_type)) | changes)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tiny_encoders.settings(source)))
    said = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "a.yaml")])
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("shardmill: ") and said.stderr.count("\n") == 1
    assert re.search(message, said.stderr), said.stderr


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a context": ({"context": 64}, "context: an encoder has none"),
    "a topology with a gap": ({"topology": [[0, 1], [2, 3]]}, "topology: layer 1 is in no part"),
    "a topology that overlaps": ({"topology": [[0, 2], [1, 3]]}, "overlaps the part before it, which ends at 2"),
    "a topology with an empty part": ({"topology": [[0, 1], [1, 1], [1, 3]]}, r"\[1, 1\] holds no layer"),
    "a prediction": ({"predict": ["ane"]}, "predict: an encoder has none"),
    "a number of tokens": ({"tokens": {"max": 8}}, "tokens: an encoder has none"),
    "a bucket twice": ({"buckets": [16, 16]}, "buckets: names one size twice"),
    "no bucket": ({"buckets": []}, "buckets: "),
    "a bucket of nothing": ({"buckets": [0]}, "buckets.0: "),
    "a size in words": ({"buckets": "large"}, "buckets: "),
    "another pooling": ({"pooling": "max"}, "pooling: "),
    "answers without quotes": ({"answers": [False, True]}, "answers.0: .*, is False; put the word in quotes"),
    "one answer": ({"answers": ["yes"]}, "answers: give two different words or more"),
    "an answer twice": ({"answers": ["yes", "yes"]}, "answers: give two different words or more"),
    "an answer of nothing": ({"answers": ["yes", ""]}, "answers.1: "),
    "answers and embeddings": ({"answers": ["no", "yes"], "pooling": "last"}, "pooling: a model with `answers`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_is_refused_by_its_key(tmp_path: Path, name: str) -> None:
    changes, message = WRONG[name]
    source = write_config(tmp_path / "checkpoint", plain(tiny_encoders.tiny_config("bert")))
    with pytest.raises(ConfigError, match=message):
        config.parse(tiny_encoders.settings(source, **changes))


def test_a_decoder_pools_and_ranks_nothing(tmp_path: Path) -> None:
    source = write_config(tmp_path / "checkpoint", plain(tiny_config("qwen3")))
    for key, value in (("pooling", "last"), ("answers", ["no", "yes"])):
        with pytest.raises(ConfigError, match=f"{key}: a decoder has none"):
            config.parse(tiny.settings(str(source), **{key: value}))


UNREAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "another pooling than the checkpoint's": ("qwen3", {"pooling": "mean"}, "pooling: mean, but .* say last; leave it"),
    "a topology of another depth": (
        "qwen3",
        {"topology": [[0, 1], [1, 2]]},
        "topology: ends at layer 2, the model has 3",
    ),
    "an answer of several tokens": (
        "qwen3",
        {"answers": ["n", "yes"]},
        "answers: 'yes' is 2 tokens; each .* one token",
    ),
    "answers of a family that ranks nothing": (
        "gemma3_text",
        {"answers": ["n", "y"]},
        "gemma3_text models rank nothing",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_contradicts_the_checkpoint_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    """By `plan`, and by the step that a checkpoint from the hub meets first."""
    model_type, changes, message = UNREAD[name]
    checkpoint = tiny_encoders.write_tiny(model_type, tmp_path / "checkpoint")
    tiny_encoders.write_modules(checkpoint)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tiny_encoders.settings(checkpoint, **changes)))
    said = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "a.yaml")])
    assert said.exit_code == 1 and re.search(message, said.output)
    with pytest.raises(ShardmillError, match=message):
        encoders.parts_of(checkpoint, tmp_path, **changes)


SENTENCES: dict[str, tuple[dict[str, Any], str]] = {
    "texts in lower case": ({"do_lower_case": True}, "do_lower_case is true, and the tokenizer keeps capital letters"),
    "texts that are cut": ({"max_seq_length": 12}, r"buckets: \d+ is over 12, where .* cuts texts \(max_seq_length in"),
    "a length that is none": ({"max_seq_length": "12"}, "max_seq_length is '12'"),
}


@pytest.mark.parametrize("name", SENTENCES)
@pytest.mark.parametrize("file", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_what_sentence_transformers_does_to_texts_is_refused(tmp_path: Path, name: str, file: str) -> None:
    """A build feeds texts as they are, so its embeddings would be others, with every gate passed."""
    content, message = SENTENCES[name]
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint", "feature-extraction")
    tiny_encoders.write_modules(checkpoint, "mean")
    (checkpoint / file).write_text(json.dumps(content))
    with pytest.raises(ShardmillError, match=message) as caught:
        encoders.parts_of(checkpoint, tmp_path)
    assert file in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_tokenizer_does_itself_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """As in most English models: texts are in lower case anyway, and no text is too long."""
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint", "feature-extraction")
    tiny_encoders.write_modules(checkpoint, "mean")
    file = checkpoint / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    most = max(tiny_encoders.settings(checkpoint)["buckets"])
    content = {"do_lower_case": True, "max_seq_length": most}
    (checkpoint / "sentence_bert_config.json").write_text(json.dumps(content))
    assert encoders.parts_of(checkpoint, tmp_path)


def test_a_last_token_that_no_tokenizer_adds_is_refused(tmp_path: Path) -> None:
    """A tokenizer without it would change every embedding a little, and nobody would see it."""
    checkpoint = tiny_encoders.write_tiny("qwen3", tmp_path / "checkpoint")
    tiny_encoders.write_modules(checkpoint)
    file = checkpoint / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    with pytest.raises(ShardmillError, match=r"tokenizer\.json: puts no token after a text"):
        encoders.parts_of(checkpoint, tmp_path)


def test_who_takes_the_one_for_the_other_is_told(tmp_path: Path) -> None:
    """An encoder with a context, a decoder with buckets."""
    encoder = write_config(tmp_path / "encoder", plain(tiny_encoders.tiny_config("bert")))
    with pytest.raises(ConfigError, match="'bert' is an encoder: give `buckets`"):
        config.parse(tiny.settings(str(encoder)))
    decoder = write_config(tmp_path / "decoder", plain(tiny_config("llama")))
    with pytest.raises(ConfigError, match="'llama' is a decoder: give `context`"):
        config.parse(tiny_encoders.settings(decoder))


@pytest.mark.parametrize(
    ("positions", "most", "buckets"),
    [(512, None, (128, 512)), (512, 512, (128, 512)), (512, 256, (128, 256)), (300, None, (128, 300)), (64, 48, (48,))],
)
def test_auto_stands_for_128_and_512_or_what_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int, most: int | None, buckets: tuple[int, ...]
) -> None:
    """A build and its plan; texts that sentence-transformers cuts are no reason to refuse what nobody asked for."""
    monkeypatch.chdir(tmp_path)
    source = write_config(tmp_path / "ck", plain(tiny_encoders.tiny_config("bert", max_position_embeddings=positions)))
    if most:
        (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
    given = config.parse(tiny_encoders.settings(source, buckets="auto"))
    chosen = resolve_config(given, "a.yaml")
    assert chosen.parts == tuple(f"encoder_{size}" for size in buckets) and chosen.length == max(buckets)
    assert resolve_config(given, "a.yaml") == chosen  # as it was kept
    found = preview(given)
    assert (found.buckets, found.context) == (buckets, max(buckets))
    assert not [line for line in found.refused if "buckets" in line]
