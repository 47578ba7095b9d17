"""split refuses whatever is not the checkpoint that config.json describes, and names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from shardmill import config, plan
from shardmill.errors import CheckpointError, ConfigError
from shardmill.files import dumps, read_json, write_json
from shardmill.models.end_tokens import eos_token_ids
from shardmill.models.hf_config import load_hf_config
from shardmill.pipeline import options
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import perform
from shardmill.pipeline.steps import split as step

NAME = "model.layers.1.mlp.down_proj.weight"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("split") / "checkpoint", layers=2)


def split(checkpoint: Path, **changes: Any) -> Any:
    """What split makes of a folder laid down by fetch."""
    source = tiny.fetched(checkpoint, checkpoint.parent / "source")
    return tiny.split(source, **{"topology": [[0, 2]], **changes})


def rewritten(checkpoint: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy whose tensors, put into one file, went through `change`."""
    copy = tiny.copied_checkpoint(checkpoint, folder)
    tensors: Tensors = {}
    for file in sorted(copy.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (copy / INDEX).unlink()
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def take(tensors: Tensors) -> None:
    del tensors[NAME]


def add(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"] = tensors[NAME].clone()


def transpose(tensors: Tensors) -> None:
    tensors[NAME] = tensors[NAME].T.contiguous()


def retype(tensors: Tensors) -> None:
    tensors[NAME] = tensors[NAME].to(torch.int16)


def spoil(value: float, dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[NAME] = tensors[NAME].to(dtype)
        tensors[NAME][-1, -1] = value

    return change


FAULTS = {
    "missing": (take, rf"missing \({NAME}\)"),
    "extra": (add, r"extra \(model\.layers\.2\.mlp\.down_proj\.weight\)"),
    "misshapen": (transpose, rf"misshapen \({NAME} is \[{tiny.FFN}, 96\] instead of \[96, {tiny.FFN}\]\)"),
    "of a wrong dtype": (retype, rf"{NAME} is I16"),
    "NaN in bf16": (spoil(float("nan"), torch.bfloat16), rf"{NAME} \(NaN"),
    "NaN in fp32": (spoil(float("nan"), torch.float32), rf"{NAME} \(NaN"),
    "-Inf in fp16": (spoil(float("-inf"), torch.float16), rf"{NAME} \(Inf"),
}


def test_a_sound_checkpoint_is_split(checkpoint: Path) -> None:
    parts, _ = split(checkpoint)
    assert list(parts) == ["layers_00_02", "head_0", "head_1", "embedding"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_named(checkpoint: Path, tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(CheckpointError, match=message) as error:
        split(rewritten(checkpoint, tmp_path / "checkpoint", change))
    assert "\n" not in str(error.value)


def test_a_head_beside_a_tied_table_is_the_table(checkpoint: Path, tmp_path: Path) -> None:
    """transformers ties the two only where they are equal; where they are not, it is another model."""

    def copied(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def another(tensors: Tensors) -> None:
        copied(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    assert list(split(rewritten(checkpoint, tmp_path / "same", copied))[0])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding table, though config\.json ties"):
        split(rewritten(checkpoint, tmp_path / "other", another))


def test_frequencies_in_an_old_checkpoint_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    """Llama 2 has them for each layer, and transformers does not load them."""
    from transformers import AutoModelForCausalLM

    def with_frequencies(tensors: Tensors) -> None:
        tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((8,), 7.0) for i in range(2)}

    old = rewritten(checkpoint, tmp_path / "old", with_frequencies)
    parts, plain = split(old)[0], split(checkpoint)[0]
    assert {name: part.content for name, part in parts.items()} == {name: part.content for name, part in plain.items()}
    loaded: Any = AutoModelForCausalLM.from_pretrained(old, output_loading_info=True)
    assert not loaded[1]["unexpected_keys"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_may_come_in_any_float_dtype(checkpoint: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        tensors[NAME] = tensors[NAME].to(dtype)

    parts, _ = split(rewritten(checkpoint, tmp_path / "checkpoint", change))
    (tensor,) = [t for t in parts["layers_00_02"].tensors if t.source.tensor == NAME]
    assert tensor.dtype == {torch.float16: "F16", torch.float32: "F32"}[dtype]


def test_a_tied_table_under_the_head_s_name_alone_is_taken(checkpoint: Path, tmp_path: Path) -> None:
    """transformers ties the two from either name. Without the setting, the table is missing."""

    def head_alone(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def contents(folder: Path) -> dict[str, Any]:
        return {name: part.content for name, part in split(folder)[0].items()}

    named = rewritten(checkpoint, tmp_path / "named", head_alone)
    assert contents(named) == contents(checkpoint)
    settings = json.loads((named / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.embed_tokens\.weight\)"):
        split(named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tied_head_may_be_a_copy_in_another_dtype(checkpoint: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """As long as every number is the table's."""

    def copied(tensors: Tensors) -> None:
        table = tensors["model.embed_tokens.weight"]
        table[:] = table.to(torch.float16).to(table.dtype)  # numbers that all of the types have
        tensors["lm_head.weight"] = table.to(dtype)

    def another(tensors: Tensors) -> None:
        copied(tensors)
        tensors["lm_head.weight"][-1, -1] *= 1.5

    assert list(split(rewritten(checkpoint, tmp_path / "same", copied))[0])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding table"):
        split(rewritten(checkpoint, tmp_path / "other", another))


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(checkpoint: Path, tmp_path: Path, path: str) -> None:
    """By fetch already, and by split where a folder comes from elsewhere."""
    copy = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"][NAME] = path
    (copy / INDEX).write_text(json.dumps(index))
    (tmp_path / "outside.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match="outside.safetensors"):
        split(copy)
    write_json(copy / "source.json", {"files": {}})
    with pytest.raises(CheckpointError, match="leaves the checkpoint folder"):
        tiny.split(copy, topology=[[0, 2]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": [[0, 3]]}, "topology: ends at layer 3, the model has 2"),
        ({"topology": [[0, 1]]}, "topology: ends at layer 1, the model has 2"),
        ({"head": {"slices": 3}}, "head.slices: 3 does not divide the vocabulary of 256"),
    ],
)
def test_a_config_that_does_not_fit_the_model_is_refused(
    checkpoint: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split(checkpoint, **change)


def test_a_label_whose_token_has_no_row_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A tokenizer may have more tokens than its model's LM head."""
    copy = tiny.copied_checkpoint(checkpoint, tmp_path / "copy")
    tokenizer = tiny.train_tokenizer()
    tokenizer.add_tokens(["<|yes|>"])
    tokenizer.save(str(copy / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"program\.labels: the LM head has 256 rows, no row for token 256"):
        split(copy, program={"labels": ["None", "<|yes|>"]})


def test_long_factors_are_announced(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split(checkpoint)
    assert "long factors" not in caplog.text
    copy = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    tiny.hf_config(layers=2, original=32).save_pretrained(copy)
    split(copy)
    assert "context 64 is over the original length: LongRoPE's long factors throughout" in caplog.text


def test_eos_comes_from_the_generation_config_first(checkpoint: Path, tmp_path: Path) -> None:
    assert eos_token_ids(checkpoint, load_hf_config(checkpoint), tiny.VOCAB) == [0]
    copy = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert eos_token_ids(copy, load_hf_config(copy), tiny.VOCAB) == [3, 5]
    hf = SimpleNamespace(eos_token_id=7)
    for given, found in (({"eos_token_id": 0}, [0]), ({"eos_token_id": None}, [7]), ({"eos_token_id": []}, [7])):
        (copy / "generation_config.json").write_text(json.dumps(given))
        assert eos_token_ids(copy, hf, tiny.VOCAB) == found


@pytest.mark.parametrize("tied", [True, False])
def test_how_the_head_is_cut_is_no_other_model(tied: bool, tmp_path: Path) -> None:
    """transformers runs it uncut, so what it gave stays; another number of the head is another model."""
    checkpoint = tiny.write_checkpoint(tmp_path / "checkpoint", layers=2, tied=tied)

    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight" if tied else "lm_head.weight"][-1, -1] += 1

    other = rewritten(checkpoint, tmp_path / "other", change)
    sources = [[split(one, head={"slices": n})[1]["source"] for n in (1, 2, 4)] for one in (checkpoint, other)]
    assert [len({*found}) for found in sources] == [1, 1] and sources[0] != sources[1]


def without_eos(checkpoint: Path, folder: Path) -> Path:
    """A copy whose configs name no end token; transformers takes 32000 for its model type."""
    copy = tiny.copied_checkpoint(checkpoint, folder)
    (copy / "generation_config.json").unlink()
    content = json.loads((copy / "config.json").read_text())
    del content["eos_token_id"]
    (copy / "config.json").write_text(json.dumps(content))
    return copy


def test_without_an_end_in_the_configs_the_tokenizer_s_counts(checkpoint: Path, tmp_path: Path) -> None:
    """Rather than transformers' default for the type, which is a token of another tokenizer."""
    copy = without_eos(checkpoint, tmp_path / "checkpoint")
    for settings, found in (({}, []), ({"eos_token": "<|end|>"}, [0]), ({"eos_token": {"content": "<|end|>"}}, [0])):
        (copy / "tokenizer_config.json").write_text(json.dumps(settings))
        assert split(copy)[1]["eos_token_ids"] == found


@pytest.mark.parametrize("ids", [-1, [2, -1], 2.0, [2.5], tiny.VOCAB, 999999])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_that_no_tokenizer_has_is_one_line(checkpoint: Path, tmp_path: Path, name: str, ids: Any) -> None:
    copy = without_eos(checkpoint, tmp_path / "checkpoint")
    content = json.loads((copy / name).read_text()) if name == "config.json" else {}
    (copy / name).write_text(json.dumps(content | {"eos_token_id": ids}))
    with pytest.raises(CheckpointError) as caught:
        split(copy)
    assert f"/{name}" in str(caught.value) and repr(ids) in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused_before_a_tensor_is_read(checkpoint: Path, tmp_path: Path) -> None:
    copy = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {"another": tiny.VOCAB}
    file.write_text(json.dumps(content))
    for weights in copy.glob("*.safetensors"):
        weights.write_bytes(b"")
    source = tiny.fetched(copy, tmp_path / "source")
    with pytest.raises(CheckpointError, match="token 256, 'another', is beyond the model's vocabulary of 256"):
        tiny.split(source, topology=[[0, 2]])


@pytest.mark.parametrize("text", ["", "[]", '{"eos_token_id": "end"}', '{"eos_token_id": true}'])
def test_a_damaged_generation_config_is_named(checkpoint: Path, tmp_path: Path, text: str) -> None:
    copy = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    (copy / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        split(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 64},
        {"rope_parameters.rope_theta": 0},
        {"rope_parameters.rope_theta": "x"},
        {"rope_parameters.short_factor": [0.0] * (tiny.ROPE_DIM // 2)},
        {"rope_parameters.partial_rotary_factor": 2.0, "rope_parameters.rope_type": "default"},
    ],
)
def test_rotary_parameters_that_make_no_table_are_one_line(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    copy = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    content = json.loads((copy / "config.json").read_text())
    for key, value in change.items():
        name, _, inner = key.partition(".")
        (content[name] if inner else content)[inner or name] = value
    (copy / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="rope_parameters") as caught:
        split(copy)
    assert "\n" not in str(caught.value)


def test_the_step_writes_plan_parts_and_receipt(checkpoint: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    record = build / "source.receipt.json"
    source = tiny.fetched(checkpoint, build / "source")
    write_json(record, json.loads((source / "source.json").read_text()))
    names = ["layers_00_02", "head_0", "head_1", "embedding"]
    files = [build / "parts" / f"{name}.json" for name in names]
    settings = options.settings(config.parse(tiny.settings(str(checkpoint), topology=[[0, 2]])))
    receipt, store = build / "plan.receipt.json", Store(build / ".store")
    task = step.task(record, [], settings, store.hashes, {})
    perform(task, {"summary": build / "plan.json"} | {path.stem: path for path in files}, receipt, store)
    parts, content = tiny.split(source, topology=[[0, 2]])
    assert {path.stem: plan.load_part(path) for path in files} == parts
    assert json.loads((build / "plan.json").read_text()) == json.loads(dumps(content))
    assert set(read_json(receipt)["outputs"]) == {"summary", *names}
    assert str(tmp_path) not in (build / "plan.json").read_text() + receipt.read_text() + files[0].read_text()


@pytest.mark.parametrize(
    ("program", "same"),
    [
        ({"reshape_frequency": "frequent"}, True),
        ({"shapes": "fixed"}, False),
        ({"silu": "tanh"}, False),
        ({"state": "host"}, False),
        ({"labels": [" return"]}, False),
    ],
)
def test_the_form_of_programs_is_planned_anew_and_how_they_are_loaded_is_not(
    checkpoint: Path, tmp_path: Path, program: dict[str, Any], same: bool
) -> None:
    """Or a build whose form is changed would be given its old plan."""
    record = tmp_path / "source.receipt.json"
    write_json(record, {"files": {}})

    def key(**changes: Any) -> str:
        settings = options.settings(config.parse(tiny.settings(str(checkpoint), topology=[[0, 2]], **changes)))
        action = step.task(record, [], settings, Store(tmp_path / ".store").hashes, {}).action
        assert action is not None
        return action.key

    assert (key() == key(program=program)) == same
