"""Train the embedded demo checkpoint (resources/demo) on the standard library of the running Python.

The result is a real Phi3ForCausalLM in Hugging Face layout: 32 layers, 3:1 grouped-query attention, partial rotary,
LongRoPE with an attention factor, tied embedding. Text and tokenizer both come from the standard library's own
sources, so the script needs no network:

    python tools/train_demo.py --out resources/demo          # about an hour on 4 cores

Files are split into training and held-out by the hash of their name. What was reached (perplexity of the model and of
a smoothed bigram model over the same held-out tokens, a greedy sample) goes to OUT/training.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, Phi3ForCausalLM

END = "<|endoftext|>"
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__", "lib2to3"}
CONTEXT = 1024
HEAD_DIM, ROTARY = 32, 24
CONFIG = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 1024,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 32,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "max_position_embeddings": 32 * CONTEXT,
    "original_max_position_embeddings": CONTEXT,
    "partial_rotary_factor": ROTARY / HEAD_DIM,
    "rope_theta": 10000.0,
    # The older generation of config.json, as Phi-4-mini's own on the hub. Neither list is all ones, so that a program
    # which ignores them, or takes one for the other, cannot pass for right.
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [round(1.0 + 0.02 * i, 2) for i in range(ROTARY // 2)],
        "long_factor": [round(1.0 + 0.25 * i * i, 2) for i in range(ROTARY // 2)],
    },
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
# (share of the steps, sequence length, sequences per step): short sequences are cheaper, the last part learns the
# positions up to the full context.
PHASES = ((0.8, 512, 16), (0.2, CONTEXT, 8))


def corpus() -> tuple[list[str], list[str]]:
    """Return the standard library's Python files as (training, held-out) texts, one file in twenty held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: tuple[list[str], list[str]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED & set(name.parts):
            continue
        held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] % 20 == 0
        texts[held_out].append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Return all texts as one stream, each preceded by the end-of-text token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [0, *encoding.ids]
    return torch.tensor(ids)  # [tokens]


def bigram_perplexity(train: torch.Tensor, held_out: torch.Tensor, vocab: int) -> float:
    """Return Bigram model interpolated with unigrams (Witten-Bell), the bar that the trained model must clear."""
    pairs = np.bincount((train[:-1] * vocab + train[1:]).numpy(), minlength=vocab * vocab).reshape(vocab, vocab)
    unigram = (np.bincount(train.numpy(), minlength=vocab) + 1) / (len(train) + vocab)
    seen, kinds = pairs.sum(1, keepdims=True), (pairs > 0).sum(1, keepdims=True)
    probability = (pairs + kinds * unigram) / np.maximum(seen + kinds, 1)
    probability[seen[:, 0] == 0] = unigram
    a, b = held_out[:-1].numpy(), held_out[1:].numpy()
    return float(np.exp(-np.log(probability[a, b]).mean()))


@torch.no_grad()
def perplexity(model: torch.nn.Module, stream: torch.Tensor) -> float:
    """Return perplexity over disjoint windows of the full context."""
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, CONTEXT):
        window = stream[start : start + CONTEXT + 1]
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        total += float(cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers: Muon for the matrices inside the layers, Adam for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(step: int, steps: int) -> float:
    """Return learning-rate factor: 2 % warm-up, constant, then linear to zero over the last 40 %."""
    return min((step + 1) / (0.02 * steps), 1.0, max((steps - step) / (0.4 * steps), 0.01))


def train(model: Phi3ForCausalLM, stream: torch.Tensor, steps: int, save: Callable[[], None]) -> None:
    opts = optimizers(model)
    base = [[g["lr"] for g in opt.param_groups] for opt in opts]
    compiled = torch.compile(model, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    began, step = time.time(), 0
    for share, length, batch in PHASES:
        for _ in range(round(share * steps)):
            at = torch.randint(len(stream) - length - 1, (batch,), generator=generator)
            tokens = torch.stack([stream[i : i + length + 1] for i in at])  # [batch, length + 1]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = compiled(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt, lrs in zip(opts, base, strict=True):
                for group, lr in zip(opt.param_groups, lrs, strict=True):
                    group["lr"] = lr * rate(step, steps)
                opt.step()
                opt.zero_grad()
            step += 1
            if step % 20 == 0:
                speed = (time.time() - began) / step
                print(f"step {step}/{steps} loss {loss.item():.3f} {speed:.2f} s/step", flush=True)
            if step % 200 == 0:
                save()


def write_checkpoint(out: Path, model: Phi3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the model in Hugging Face's layout: bf16, two weight files with an index."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    names = sorted(weights)
    layer = {n: int(n.split(".")[2]) if ".layers." in n else 99 * (n == "model.norm.weight") for n in names}
    files = {n: f"model-0000{1 + (layer[n] >= 16)}-of-00002.safetensors" for n in names}
    for file in sorted(set(files.values())):
        save_file({n: weights[n] for n in names if files[n] == file}, out / file, metadata={"format": "pt"})
    total = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    wrapper = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        "model.safetensors.index.json": index,
        "tokenizer_config.json": wrapper,
    }.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)


def evaluate(out: Path, train_stream: torch.Tensor, held_out: torch.Tensor) -> dict[str, object]:
    """Return what the checkpoint in `out` reaches, as bf16 left it."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = Phi3ForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    prompt = torch.tensor([tokenizer.encode("def ").ids])
    sample = model.generate(prompt, max_new_tokens=120, do_sample=False)[0].tolist()
    return {
        "training_tokens": len(train_stream),
        "held_out_tokens": len(held_out),
        "held_out_perplexity": round(perplexity(model, held_out), 3),
        "bigram_perplexity": round(bigram_perplexity(train_stream, held_out, CONFIG["vocab_size"]), 3),
        "greedy_sample": tokenizer.decode(sample),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("resources/demo"))
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--evaluate", action="store_true", help="only measure the checkpoint in OUT again")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_texts, held_texts = corpus()
    record_file = args.out / "training.json"
    if args.evaluate:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
        record = json.loads(record_file.read_text())
    else:
        tokenizer = train_tokenizer(train_texts)
    stream, held_out = encode(tokenizer, train_texts), encode(tokenizer, held_texts)
    print(f"{len(stream)} training tokens, {len(held_out)} held out", flush=True)
    if not args.evaluate:
        record = train_from_scratch(args.out, tokenizer, stream, args.steps)
    record |= evaluate(args.out, stream, held_out)
    record_file.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def train_from_scratch(out: Path, tokenizer: Tokenizer, stream: torch.Tensor, steps: int) -> dict[str, object]:
    """Write the checkpoint; returns how it was made."""
    config = AutoConfig.for_model(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")})
    model = Phi3ForCausalLM(config)
    for name, weight in model.named_parameters():  # residual branches start small: 64 of them add up
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data /= math.sqrt(2 * config.num_hidden_layers)
    began = time.time()
    train(model, stream, steps, lambda: write_checkpoint(out, model, tokenizer))
    write_checkpoint(out, model, tokenizer)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "steps": steps,
        "minutes": round((time.time() - began) / 60, 1),
    }


if __name__ == "__main__":
    main()
