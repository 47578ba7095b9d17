"""Programs with an adapter compute what PEFT computes, and without one what programs without the form compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapters
import limits
import numpy as np
import pytest
import tiny
import torch
from drafted_decoding import PrefixCache, Session, create_drafter, run
from drafted_decoding.policies import AlwaysDraft
from models import tiny_families
from safetensors.torch import load_file, save_file

from shardmill.errors import AdapterError, ShardmillError
from shardmill.gates.disturbed import longest_sum, probe
from shardmill.gates.stack import feed
from shardmill.machine import is_portable
from shardmill.runtime.adapters import adapters_of, load_adapter, remove_adapter
from shardmill.runtime.adding import add_adapter
from shardmill.runtime.engine import load
from shardmill.runtime.kv import Floats

pytestmark = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
TEXT = tiny_families.tiny_text()
PASSES = tiny_families.random_passes(len(TEXT), 0)
# Norms around branches, MLPs without gates, both branches of one norm, layers with convolutions, experts, sources of
# rows in another order, two projections in one tensor, a scaled stream.
FAMILIES = ["llama", "qwen3", "gemma3_text", "nemotron", "cohere2", "lfm2", "mixtral", "helium", "glm4", "granite"]


def logits_agree(what: str, found: Floats, model: Any) -> None:
    """Fail if logits are not those of transformers' model, whose adapter may amplify errors as its scores grow."""
    __tracebackhide__ = True
    truth = adapters.logits_of(model, TEXT)
    probed = probe(model, lambda: torch.from_numpy(adapters.logits_of(model, TEXT)), torch.from_numpy(truth))
    limits.rows_agree(what, found, truth, limits.moved(probed.moved, longest_sum(model)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of two parts of layers and one of a single layer."""
    return adapters.build(tmp_path_factory.mktemp("adapters"), "phi3", topology=tiny.TOPOLOGY)


def test_an_adapter_computes_what_peft_computes(made: Path, tmp_path: Path) -> None:
    lora = adapters.write_lora(made / "source", tmp_path / "lora")
    add_adapter(made, lora, "one")
    engine = load(made, "fp32")
    bare = feed(engine, TEXT, PASSES)
    logits_agree("without an adapter", bare, tiny.transformers_model(made / "source"))
    engine.adapt("one")
    engine.reset()
    model = adapters.merged(made / "source", lora)
    logits_agree("with an adapter", feed(engine, TEXT, PASSES), model)
    assert limits.error(adapters.logits_of(model, TEXT), bare) > 0.1
    engine.adapt(None)
    engine.reset()
    assert np.array_equal(feed(engine, TEXT, PASSES), bare)


def test_without_an_adapter_logits_are_those_of_programs_without_the_form(made: Path, tmp_path: Path) -> None:
    plain = adapters.build(tmp_path, "phi3", {"shapes": "fixed"}, topology=tiny.TOPOLOGY)
    for precision in ("fp32", "fp16"):
        adapted, bare = (feed(load(build, precision), TEXT, PASSES) for build in (made, plain))
        assert np.array_equal(adapted, bare)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_what_peft_computes(family: str, tmp_path: Path) -> None:
    program = {"state": "host", "adapters": 4}
    build = adapters.build(tmp_path / "build", family, program)
    source, held = build / "source", adapters.as_held(build, program)
    names = adapters.targets(source, "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", *adapters.MLPS)
    lora = adapters.write_lora(source, tmp_path / "lora", r=4, lora_alpha=4, use_rslora=True, target_modules=names)
    add_adapter(build, lora, "one")
    engine = load(build, "fp32")
    engine.adapt("one")
    bare = adapters.logits_of(held, TEXT)
    model = adapters.merged(source, lora, held)
    logits_agree(family, feed(engine, TEXT, PASSES), model)
    assert limits.error(adapters.logits_of(model, TEXT), bare) > 0.5


FORMS: dict[str, dict[str, Any]] = {
    "range, host": {"state": "host"},
    "fixed, host, a ladder of contexts": {"shapes": "fixed", "state": "host", "contexts": [32]},
    "fixed, a ladder of contexts": {"shapes": "fixed", "contexts": [32]},
    "enumerated, host": {"shapes": "enumerated", "state": "host"},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_int8_programs_compute_the_same(form: str, tmp_path: Path) -> None:
    logits = list[Floats]()
    for name, program in {"fixed": {"shapes": "fixed"}, form: FORMS[form]}.items():
        build = adapters.build(tmp_path / name, "phi3", program | {"adapters": 6}, "int8")
        add_adapter(build, adapters.write_lora(build / "source", tmp_path / "lora"), "one")
        engine = load(build, "fp32")
        engine.adapt("one")
        logits.append(feed(engine, TEXT, PASSES))
    limits.rows_agree(form, *logits, limits.model(tiny.LAYERS, tiny.FFN))


def test_each_module_has_its_rank_and_factor(made: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": r".*\.(qkv_proj|down_proj)", "use_rslora": True}
    options |= {"rank_pattern": {"down_proj": 1}, "alpha_pattern": {r"layers\.1\.self_attn\.qkv_proj": 16}}
    lora = adapters.write_lora(made / "source", tmp_path / "lora", **options)
    add_adapter(made, lora, "ranks")
    engine = load(made, "fp32")
    engine.adapt("ranks")
    logits_agree("ranks and factors", feed(engine, TEXT, PASSES), adapters.merged(made / "source", lora))


def test_a_small_b_keeps_its_digits(made: Path, tmp_path: Path) -> None:
    """Below 2^-14 fp16 holds fewer digits, and the Neural Engine may take such numbers for zero."""
    lora = adapters.write_lora(made / "source", tmp_path / "lora")
    weights = load_file(lora / "adapter_model.safetensors")
    save_file({n: w / (4096 if ".lora_B." in n else 1) for n, w in weights.items()}, lora / "adapter_model.safetensors")
    add_adapter(made, lora, "small")
    held = load_adapter(made, json.loads((made / "model.json").read_text()), "small")
    matrices = np.concatenate([np.abs(one[one != 0]).ravel() for part in held.values() for one in part.values()])
    assert np.quantile(matrices, 0.05) > 2.0**-14


def test_adapters_are_listed_replaced_and_removed(made: Path, tmp_path: Path) -> None:
    lora = adapters.write_lora(made / "source", tmp_path / "lora", target_modules=["o_proj"])
    for _ in range(2):
        add_adapter(made, lora, "listed")
    (found,) = (one for one in adapters_of(made) if one.name == "listed")
    assert (found.rank, found.modules) == (4, tiny.LAYERS)
    remove_adapter(made, "listed")
    assert all(one.name != "listed" for one in adapters_of(made))
    with pytest.raises(ShardmillError, match="no adapter is called 'listed'"):
        load(made).adapt("listed")


def test_other_programs_and_other_bytes_are_refused(made: Path, tmp_path: Path) -> None:
    lora = adapters.write_lora(made / "source", tmp_path / "lora")
    add_adapter(made, lora, "bound")
    manifest = json.loads((made / "model.json").read_text())
    manifest["packages"]["layers_00_02"]["files"] = {"model.mlmodel": "0"}
    with pytest.raises(ShardmillError, match="was made for other programs"):
        load_adapter(made, manifest, "bound")
    file = made / "adapters/bound/adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"\0\1")
    with pytest.raises(ShardmillError, match="is not the file that was added"):
        load(made).adapt("bound")


def test_adapters_that_do_not_fit_are_refused_in_one_line(made: Path, tmp_path: Path) -> None:
    source = made / "source"

    def refusal(folder: Path) -> str:
        with pytest.raises(ShardmillError) as refused:
            add_adapter(made, folder, "refused")
        assert "\n" not in str(refused.value)
        assert not (made / "adapters/refused").exists()
        return str(refused.value)

    wide = adapters.write_lora(source, tmp_path / "wide", r=9)
    assert "its rank is 9" in refusal(wide) and "takes 8 at most" in refusal(wide)
    head = adapters.write_lora(source, tmp_path / "head", target_modules=["lm_head"])
    assert "lm_head" in refusal(head)
    other = tiny.write_checkpoint(tmp_path / "other", layers=5)
    assert "layers.4" in refusal(adapters.write_lora(other, tmp_path / "deep"))
    large = adapters.write_lora(source, tmp_path / "large", size=5e3, lora_alpha=65536)
    assert "fp16 can't hold" in refusal(large)
    weights = load_file(large / "adapter_model.safetensors")
    foreign = {n: torch.nn.functional.pad(w, (0, 0, 0, 8 * ("lora_B" in n))) / 1e4 for n, w in weights.items()}
    save_file(foreign, large / "adapter_model.safetensors")
    assert "its matrices are for a weight of 104 x 128; the base model's weight is 96 x 128" in refusal(large)
    plain = adapters.build(tmp_path / "plain", "phi3", {})
    with pytest.raises(ShardmillError, match="its programs take no adapters"):
        add_adapter(plain, head, "one")
    with pytest.raises(ShardmillError, match="can't be an adapter's name"):
        add_adapter(made, head, "../one")
    manifest = made / "model.json"
    before = manifest.read_text()
    manifest.write_text(before.replace('"repo": null', '"repo": "Qwen/Qwen2.5-0.5B"'))
    content = json.loads((wide / "adapter_config.json").read_text())
    (wide / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    said = refusal(wide)
    manifest.write_text(before)
    assert "is an adapter of Qwen/Qwen3-0.6B, the build is of Qwen/Qwen2.5-0.5B" in said


def test_a_session_forgets_its_tokens_with_its_adapter(made: Path, tmp_path: Path) -> None:
    """Two adapters in turns say what PEFT's merged models say, and no prefix of one is reused by the other."""
    source, prompt, told = made / "source", TEXT[:12], {}
    for seed, name in enumerate(("first", "second"), start=1):
        lora = adapters.write_lora(source, tmp_path / name, seed, 0.25)
        add_adapter(made, lora, name)
        told[name] = adapters.greedy(adapters.merged(source, lora), prompt, 12)
    told[""] = adapters.greedy(tiny.transformers_model(source), prompt, 12)
    assert len({tuple(tokens) for tokens in told.values()}) == 3
    session = Session(load(made, "fp32"))
    for name in ("first", "second", "", "first", "first", "second"):
        session.use_adapter(name or None)
        result = run(session, prompt, max_new_tokens=12, drafter=create_drafter("ngram"), policy=AlwaysDraft())
        assert list(result.tokens) == told[name]
    assert result.reused_tokens == 0
    with pytest.raises(AdapterError):
        session.use_adapter("missing")
    assert list(run(session, prompt, max_new_tokens=12).tokens) == told["second"]
    other = Session(session.engine)
    assert list(run(other, prompt, max_new_tokens=12).tokens) == told[""]


def test_kept_prefixes_belong_to_an_adapter_s_matrices(made: Path, tmp_path: Path) -> None:
    """A session recalls what an adapter computed; an adapter that replaces it under its name computes anew."""
    source, prompt, told = made / "source", (TEXT * 3)[:40], {}
    for seed in (1, 2):
        lora = adapters.write_lora(source, tmp_path / str(seed), seed, 0.25)
        told[seed] = adapters.greedy(adapters.merged(source, lora), prompt, 6)
    told[0] = adapters.greedy(tiny.transformers_model(source), prompt, 6)
    add_adapter(made, tmp_path / "1", "kept")
    engine = load(made, "fp32")
    session = Session(engine, prefixes=PrefixCache(engine, 1 << 24))
    found = []
    for name, seed in ((None, 0), ("kept", 1), (None, 0), ("kept", 1), ("kept", 2), ("kept", 2)):
        if seed == 2:
            add_adapter(made, tmp_path / "2", "kept")
        session.use_adapter(name)
        result = run(session, prompt, max_new_tokens=6)
        assert list(result.tokens) == told[seed]
        found.append(result.reused_tokens > 0)
    assert found == [False, False, True, True, False, True]


@pytest.mark.slow
def test_experts_that_the_host_routes_to_stay_as_they_are(tmp_path: Path) -> None:
    build = adapters.build(tmp_path / "build", "mixtral", experts="routed")
    lora = adapters.write_lora(build / "source", tmp_path / "lora", target_modules=["q_proj", "k_proj", "o_proj"])
    add_adapter(build, lora, "one")
    engine = load(build, "fp32")
    engine.adapt("one")
    logits_agree("experts", feed(engine, TEXT, PASSES), adapters.merged(build / "source", lora))
