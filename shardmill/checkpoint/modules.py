"""Reads how sentence-transformers makes embeddings of a checkpoint's hidden states: pooling, projections, prompts.

Source of the files' meaning: sentence-transformers 6.2, base/model.py and the modules Pooling, Dense and Normalize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.checkpoint.headers import damaged, read_header
from shardmill.checkpoint.paths import SINGLE_FILE, check_name
from shardmill.checkpoint.tokenizer import TOKENIZER, keeps_capitals
from shardmill.errors import CheckpointError, ConfigError
from shardmill.files import load_json

MODULES, PROMPTS, CONFIG = "modules.json", "config_sentence_transformers.json", "config.json"
# sentence-transformers takes the first that is there.
TEXT_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # sentence-transformers' name -> shardmill's
FORMER = {f"pooling_mode_{name}": name for name in ("max_tokens", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")}
FORMER |= {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}
WEIGHT, BIAS = "linear.weight", "linear.bias"
SENTENCE = "sentence_embedding"  # what a Dense module reads and writes


@dataclass(frozen=True)
class Dense:
    """A projection of the pooled row."""

    file: str  # with the tensors linear.weight [out, in] and, with a bias, linear.bias [out]
    activation: str  # "identity" or "tanh"
    width: int  # numbers that come out


@dataclass(frozen=True)
class Modules:
    """The way from hidden states to an embedding, before it is scaled to length 1."""

    pooling: str | None = None  # "mean", "cls" or "last"; None if the checkpoint does not say
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)  # put before a text, by name
    prompt: str | None = None  # the name of the prompt of a text that asks for none


def read_modules(folder: Path, width: int) -> Modules:
    """Return what the files in a checkpoint's folder say; a checkpoint without these files says nothing.

    Args:
        folder: the folder.
        width: numbers of a hidden state.

    Raises:
        CheckpointError: for a module that the host can't compute, or a file that is damaged or missing.
    """
    listed = _listed(folder)
    named, pooling, dense = [kind for kind, _ in listed], None, list[Dense]()
    if named:
        last = len(named) - (named[-1] == "Normalize")  # every embedding is scaled to length 1, with it or without
        if named[:2] != ["Transformer", "Pooling"] or set(named[2:last]) - {"Dense"}:
            raise CheckpointError(
                f"{folder / MODULES}: names {', '.join(named)}; an embedding is made by Transformer, Pooling, any "
                "number of Dense and Normalize, in this order"
            )
        pooling = _pooling(folder / listed[1][1] / CONFIG)
        for _, path in listed[2:last]:
            dense.append(_dense(folder, path, dense[-1].width if dense else width))
    prompts, prompt = _prompts(folder / PROMPTS)
    return Modules(pooling, tuple(dense), prompts, prompt)


def check_text_settings(folder: Path, buckets: Sequence[int]) -> None:
    """Check that sentence-transformers would feed the same texts, by its file beside the Transformer module.

    It makes texts lower case, and cuts them, before the tokenizer sees them; a build does neither.

    Args:
        folder: the checkpoint's folder.
        buckets: the lengths of the build's programs in tokens.

    Raises:
        CheckpointError: texts are to be made lower case, and the tokenizer does not do it.
        ConfigError: a bucket holds longer texts than sentence-transformers feeds.
    """
    file, content = _text_settings(folder)
    if content.get("do_lower_case") and (folder / TOKENIZER).is_file() and keeps_capitals(folder / TOKENIZER):
        raise CheckpointError(
            f"{file}: do_lower_case is true, and the tokenizer keeps capital letters; a build feeds texts as they are: "
            f"give {TOKENIZER} a Lowercase normalizer"
        )
    most = longest_text(folder)
    if most is not None and max(buckets) > most:
        raise ConfigError(
            f"buckets: {max(buckets)} is over {most}, where sentence-transformers cuts texts (max_seq_length in "
            f"{file.name}); give buckets of at most {most}"
        )


def longest_text(folder: Path) -> int | None:
    """Return the number of tokens to which sentence-transformers cuts a text; None if the checkpoint names none.

    Raises CheckpointError if what it names is no such number.
    """
    file, content = _text_settings(folder)
    most = content.get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise damaged(file, f"max_seq_length is {most!r}")
    return most


def _text_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file beside the Transformer module and its content, which is empty if there is no such file."""
    file = next((folder / name for name in TEXT_SETTINGS if (folder / name).is_file()), folder / TEXT_SETTINGS[0])
    content = _read(file, {})
    if not isinstance(content, dict):
        raise damaged(file, "no JSON object")
    return file, content


def _listed(folder: Path) -> list[tuple[str, str]]:
    """Return each module's class and folder, in order."""
    content = _read(folder / MODULES, [])
    try:
        modules = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in content]
    except (KeyError, TypeError) as error:
        raise damaged(folder / MODULES, "no list of modules with `type` and `path`") from error
    for _, path in modules:
        check_name(f"{path}/{CONFIG}" if path else CONFIG, str(folder / MODULES))
    return modules


def _pooling(file: Path) -> str:
    """Return the pooling that a Pooling module's config names, in its present or its former spelling."""
    content = _object(file)
    modes = content.get("pooling_mode") or [name for key, name in FORMER.items() if content.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        named = " and ".join(map(str, modes))
        raise CheckpointError(f"{file}: the pooling is {named}; embeddings are pooled by one of {', '.join(POOLINGS)}")
    if content.get("include_prompt") is False:
        raise CheckpointError(f"{file}: include_prompt is false; a prompt's tokens are pooled with the text's here")
    return POOLINGS[modes[0]]


def _dense(folder: Path, path: str, width: int) -> Dense:
    """Return a Dense module, after a comparison of its config with its tensors."""
    file, name = folder / path / CONFIG, f"{path}/{SINGLE_FILE}"
    content = _object(file)
    activation = content.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{file}: activation_function is {activation}; the host has {', '.join(ACTIVATIONS)}")
    reads, writes = (content.get(f"module_{key}_name") or SENTENCE for key in ("input", "output"))
    if content.get("use_residual") or (reads, writes) != (SENTENCE, SENTENCE):
        raise CheckpointError(f"{file}: only a plain projection of the embedding is built")
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder / name}: missing; fetch a revision that has the projection as safetensors")
    shapes = {info.name: info.shape for info in read_header(folder, name)}
    out = content.get("out_features")
    wanted = {WEIGHT: (out, width)} | ({BIAS: (out,)} if content.get("bias", True) else {})
    if shapes != wanted:
        raise CheckpointError(f"{folder / name}: holds {shapes} instead of {wanted}; fetch the checkpoint again")
    return Dense(name, ACTIVATIONS[activation], shapes[WEIGHT][0])


def _prompts(file: Path) -> tuple[dict[str, str], str | None]:
    """Return prompts by name, and the name of the default one."""
    content = _read(file, {})
    prompts = (content.get("prompts") if isinstance(content, dict) else None) or {}
    name = content.get("default_prompt_name") if isinstance(content, dict) else None
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise damaged(file, "`prompts` are not texts by name")
    named = {str(key): text for key, text in sorted(prompts.items()) if text is not None}
    if name is not None and name not in named:
        raise damaged(file, f"default_prompt_name {name!r} is none of the prompts")
    return named, name


def _object(file: Path) -> dict[str, Any]:
    """Return a JSON file's object."""
    content = _read(file, None)
    if not isinstance(content, dict):
        raise damaged(file, "missing, or no JSON object")
    return content


def _read(file: Path, missing: Any) -> Any:
    """Return a JSON file's content, or `missing` if the file does not exist."""
    if not file.is_file():
        return missing
    try:
        return load_json(file)
    except ValueError as error:
        raise damaged(file, "not JSON") from error
