"""The reference is transformers' own forward pass, whichever way its weights come, one layer's at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import limits
import pytest
import tiny
import torch
from convert.small import write_family
from models.tiny_families import tiny_model, write_tiny
from torch import Tensor
from transformers import AutoModelForImageTextToText

from shardmill.checkpoint.headers import read_tensors
from shardmill.gates.naming import Weights, loading
from shardmill.gates.reference import HEAD_ROWS, Reference, checkpoint_weights
from shardmill.gates.replacements import at_length
from shardmill.models.architecture import prefix_of

from . import judged

FAMILIES = ("llama", "gemma2", "gemma3_text", "granite", "lfm2", "smollm3")
TOKENS = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("reference") / "checkpoint", request.param)


def test_a_layer_keeps_the_table_that_it_computed() -> None:
    """Its weights are freed after each call. RecurrentGemma's attention has a rotary table of its own."""
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"))
    layer.register_buffer("table", torch.ones(2), persistent=False)
    weights = {"0.weight": torch.eye(2), "0.bias": torch.ones(2)}
    with loading({"": layer}, {}, weights.__getitem__, lambda: None):
        assert [layer(torch.ones(1, 2)).tolist() for _ in range(2)] == [[[2.0, 2.0]]] * 2
    assert {name: values.is_meta for name, values in [*layer.named_parameters(), *layer.named_buffers()]} == {
        "0.weight": True,
        "0.bias": True,
        "table": False,
    }


def plain_model(source: Path) -> Any:
    """transformers' model as anyone would load it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


def plain_run(model: Any, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states at every layer's edge [layers + 1, n, d] and logits [n, vocab] of an ordinary forward pass."""
    last: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out if isinstance(out, Tensor) else out[0])
    )
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    edges = [*out.hidden_states[:-1], last[0]]  # transformers' own last one is after the norm
    return torch.stack([edge[0] for edge in edges]), out.logits[0]


def run(judge: Reference, source: Path, tokens: list[int], weights: Weights | None = None) -> dict[str, Tensor]:
    """The reference's pass with the checkpoint's weights, the LM head in blocks."""
    weights = weights or checkpoint_weights(source)
    table = weights("model.embed_tokens.weight")
    head = table if judge.model.config.tie_word_embeddings else weights("lm_head.weight")
    return judge.run(tokens, lambda ids: table[ids], torch.split(head, 100), weights)


def close(found: Tensor, expected: Tensor) -> None:
    __tracebackhide__ = True
    limits.rows_agree("hidden states or logits", found, expected, limits.model(4, 128))


def test_every_layer_and_the_logits_are_those_of_an_ordinary_pass(source: Path) -> None:
    hidden, logits = plain_run(plain_model(source), TOKENS)
    found = run(Reference(source, 64), source, TOKENS)
    close(found["hidden"], hidden)
    close(found["logits"], logits)


@pytest.mark.parametrize(
    ("kind", "stacked"), [("mistral3", False), ("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)]
)
def test_a_text_tower_s_logits_are_those_of_the_whole_model(kind: str, stacked: bool, tmp_path: Path) -> None:
    """Transformers' text class renames the tensors of qwen3_5's towers, and leaves mistral3's as they are."""
    source = write_tiny(kind, tmp_path / "checkpoint", stacked=stacked)
    whole = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([TOKENS])).logits[0]
    weights = checkpoint_weights(source, prefix_of(read_tensors(source), "model."))
    close(run(Reference(source, 64), source, TOKENS, weights)["logits"], expected)


@pytest.mark.parametrize("indices", [range(0, 2), range(1, 3), range(2, 4), range(3, 4), range(0, 4)])
def test_a_range_of_layers_takes_over_in_the_middle(source: Path, indices: range) -> None:
    """Given the input of the first of them, each gives what it does in the whole model."""
    hidden, _ = plain_run(plain_model(source), TOKENS)
    found = Reference(source, 64).layers(hidden[indices.start], indices, checkpoint_weights(source))
    close(torch.stack(found), hidden[indices.start + 1 : indices.stop + 1])


def test_the_head_takes_over_after_the_last_layer(source: Path) -> None:
    hidden, logits = plain_run(plain_model(source), TOKENS)
    judge, weights = Reference(source, 64), checkpoint_weights(source)
    name = "model.embed_tokens.weight" if judge.model.config.tie_word_embeddings else "lm_head.weight"
    close(judge.logits(hidden[-1], torch.split(weights(name), 100), weights), logits)
    close(judge.logits(hidden[-1], [weights(name)[100:150]], weights), logits[:, 100:150])


def resident(judge: Reference) -> set[str]:
    """Modules right below the decoder, or single layers, that hold weights now."""
    held = [name for name, weight in judge.decoder.named_parameters() if not weight.is_meta]
    return {".".join(name.split(".")[: 2 if name.startswith("layers.") else 1]) for name in held}


def test_one_layer_s_weights_are_in_memory_at_a_time(source: Path) -> None:
    """A model of any depth takes the memory of one layer; afterwards none is left."""
    judge, weights = Reference(source, 64), checkpoint_weights(source)
    assert all(weight.is_meta for weight in judge.model.parameters())
    asked, norm = list[str](), judge.final_norm

    def watched(name: str) -> Tensor:
        module = ".".join(name.split(".")[1 : 3 if ".layers." in name else 2])
        if name.startswith("model.") and "embed_tokens" not in name:
            assert resident(judge) - {"embed_tokens"} <= {module, norm}
            asked.append(name)
        return weights(name)

    run(judge, source, TOKENS, watched)
    expected = [
        name for name, _ in judge.model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name
    ]
    assert sorted(asked) == sorted(expected)  # each once
    assert all(weight.is_meta for weight in judge.model.parameters())
    judge.layers(torch.zeros(4, 128), [1, 2], watched)
    assert all(weight.is_meta for weight in judge.model.parameters())


def test_numbers_of_its_own_are_fp32_whatever_the_checkpoint_s_dtype(source: Path) -> None:
    """Such as Gemma's factor of the embeddings, which bf16 would round by up to 0.4 %."""
    assert {buffer.dtype for buffer in Reference(source, 64).model.buffers()} == {torch.float32}


def test_it_runs_as_often_as_wanted(source: Path) -> None:
    """Nothing of a pass is left in the model: neither hooks nor replaced modules nor a cache."""
    judge, weights = Reference(source, 64), checkpoint_weights(source)
    first = run(judge, source, TOKENS)
    judge.layers(first["hidden"][1], [1, 2], weights)
    again = run(judge, source, TOKENS[:9])
    close(again["logits"], first["logits"][:9])
    assert torch.equal(run(judge, source, TOKENS)["logits"], first["logits"])


# The small Phi-3, with LongRoPE.


def test_layer_by_layer_is_the_whole_model(built: tiny.Build) -> None:
    hidden, logits = plain_run(tiny.transformers_model(built.source), list(built.text))
    known = judged.known(built.source)
    close(known["logits"], logits)
    close(known["hidden"], hidden)


def test_an_untied_head_is_its_own(untied: tiny.Build) -> None:
    found = run(Reference(untied.source, tiny.CONTEXT), untied.source, list(untied.text))
    with torch.no_grad():
        expected = tiny.transformers_model(untied.source)(torch.tensor([untied.text])).logits[0]
    close(found["logits"], expected)


def test_the_context_decides_the_factors_however_little_is_fed(built: tiny.Build, tmp_path: Path) -> None:
    """As for a whole sequence of that length: a test may feed fewer tokens."""
    long = tiny.relabelled(built, tmp_path, original=tiny.CONTEXT // 2)
    whole, _ = plain_run(tiny.transformers_model(long.source), list(long.text))  # over the original length
    few = list(long.text[:8])
    found = run(Reference(long.source, tiny.CONTEXT), long.source, few)
    close(found["hidden"], whole[:, :8])
    short, _ = plain_run(tiny.transformers_model(long.source), few)
    assert not torch.allclose(short[-1], whole[-1, :8], rtol=1e-3)
    alone = run(Reference(long.source, tiny.CONTEXT // 2), long.source, few)
    close(alone["hidden"], short)


@pytest.mark.parametrize("context", [64, 128, 129, 4096])
@pytest.mark.parametrize("model_type", ["phi3", "llama", "gpt_oss", "hunyuan_v1_dense", "gemma3_text"])
def test_rotary_rows_are_those_of_the_whole_context_s_table(model_type: str, context: int) -> None:
    """LongRoPE before and after its original length, llama3, YaRN and dynamic; without making the whole table."""
    rotary = tiny_model(model_type).model.rotary_emb
    whole, fed, positions = rotary.forward, list[int](), torch.tensor([[0, 1, 2, 40, 41, 7]])

    def counted(x: Tensor, position_ids: Tensor, *args: Any) -> Any:
        fed.append(position_ids.shape[1])
        return whole(x, position_ids, *args)

    layer_type = ("full_attention",) if model_type == "gemma3_text" else ()
    expected = [table[:, positions[0]] for table in whole(torch.zeros(1), torch.arange(context)[None], *layer_type)]
    found = at_length(counted, context)(torch.zeros(1), positions, *layer_type)
    assert fed == [7]
    assert len(found) == 2 and all(map(torch.equal, found, expected))


def test_weights_may_be_others(built: tiny.Build) -> None:
    """The dequantised ones of a package, say: nothing is left of the checkpoint's."""
    judge, x = Reference(built.source, tiny.CONTEXT), judged.known(built.source)["hidden"][2][:4]
    plain = checkpoint_weights(built.source)
    first = judge.layers(x, [2], plain)[-1]
    doubled = judge.layers(x, [2], lambda name: 2 * plain(name))[-1]
    assert not torch.allclose(first, doubled)
    assert torch.equal(judge.layers(x, [2], plain)[-1], first)


@pytest.mark.parametrize("biased", [False, True])
def test_logits_come_into_a_place_that_is_used_again(source: Path, biased: bool) -> None:
    """For a model with a bias at its head, too: what lay there before does not count."""
    judge, weights = Reference(source, 64), checkpoint_weights(source)
    table = weights("model.embed_tokens.weight")
    bias = torch.linspace(-1, 1, len(table))
    if biased:
        judge.model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    states = run(Reference(source, 64), source, TOKENS)["hidden"][-1]

    def known(name: str) -> Tensor:
        return bias if name == "lm_head.bias" else weights(name)

    expected, room = judge.logits(states, [table], known), torch.full((len(TOKENS), len(table)), torch.nan)
    for _ in range(2):
        close(judge.logits(states, torch.split(table, 100), known, into=room), expected)


def test_a_checkpoint_may_call_the_decoder_otherwise(built: tiny.Build, tmp_path: Path) -> None:
    """As multimodal models do; the names asked for are transformers'."""
    from safetensors.torch import load_file, save_file

    renamed = {}
    for file in built.source.glob("*.safetensors"):
        renamed |= {name.replace("model.", "language_model.model.", 1): t for name, t in load_file(file).items()}
    save_file(renamed, tmp_path / "model.safetensors")
    plain, other = checkpoint_weights(built.source), checkpoint_weights(tmp_path, "language_model.model.")
    for name in ("model.norm.weight", "model.layers.3.mlp.down_proj.weight"):
        assert torch.equal(plain(name), other(name))


def test_an_untied_head_lies_beside_a_decoder_that_is_called_otherwise(tmp_path: Path) -> None:
    """As transformers itself writes a multimodal model."""
    source = write_tiny("mistral3", tmp_path / "checkpoint")
    names, prefix = read_tensors(source), "language_model.model."
    assert {f"{prefix}norm.weight", "language_model.lm_head.weight"} <= names.keys()
    weights = checkpoint_weights(source, prefix)
    assert weights("lm_head.weight").shape == weights("model.embed_tokens.weight").shape
    assert not torch.equal(weights("lm_head.weight"), weights("model.embed_tokens.weight"))


def test_an_activation_s_fixed_numbers_are_the_checkpoint_s(tmp_path: Path) -> None:
    """No program holds them. A checkpoint with another beta, which programs would not honour, must not pass a gate."""
    from safetensors.torch import load_file, save_file

    found = {}
    for beta in (0.5, 0.25):
        source = write_tiny("apertus", tmp_path / str(beta))
        for file in source.glob("*.safetensors"):
            tensors = load_file(file)
            changed = {name: torch.full_like(t, beta) for name, t in tensors.items() if name.endswith("act_fn.beta")}
            save_file(tensors | changed, file, metadata={"format": "pt"})
        weights = checkpoint_weights(source)

        def held(name: str, weights: Weights = weights) -> Tensor:
            assert not name.endswith(("act_fn.beta", "act_fn.eps")), "a package would not have it"
            return weights(name)

        found[beta] = run(Reference(source, 64), source, TOKENS, held)["logits"]
        close(found[beta], plain_run(plain_model(source), TOKENS)[1])
    assert not torch.allclose(found[0.5], found[0.25], atol=0.1)


def test_a_head_of_a_real_vocabulary_comes_in_more_than_one_block() -> None:
    """In fp32 the whole of it would take gigabytes."""
    assert HEAD_ROWS * 4 * 5120 < 400e6
