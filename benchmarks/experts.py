"""Do programs take the experts that transformers takes? Every family with experts, on some thousand tokens.

    python benchmarks/experts.py [--tokens 2000] [--scratch FOLDER] [--only zaya ...]

For each a small synthetic checkpoint of random weights goes through the pipeline up to the parity gate of its layers.
Printed is the share of tokens and layers with the same experts: in fp32 with the weights as the package holds them, and
as shipped against the original weights, with what the gate says of choices that are closer than fp16 tells apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from convert import machine
from scratch import ROOT, gate_rows

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.models.synthetic import write_synthetic_checkpoint

DEMO, TEXT = ROOT / "resources/demo", ROOT / "resources/text/parity.txt"
BASE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
LOCAL = {"num_local_experts": 12, "num_experts_per_tok": 3}
CONV = ["conv", "conv", "full_attention", "conv"]
ZAYA = {"num_attention_heads": 8, "head_dim": 32, "moe_intermediate_size": 32, "num_experts": 16}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": LOCAL,
    "granitemoe": LOCAL | {"residual_multiplier": 0.22, "logits_scaling": 6.0},
    "olmoe": {"num_experts": 12, "num_experts_per_tok": 3},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 48, "num_experts": 80, "num_experts_per_tok": 4},
    "phimoe": {"num_local_experts": 12, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": CONV, "moe_intermediate_size": 48, "num_dense_layers": 1}
    | {"num_experts": 12, "num_experts_per_tok": 3},
    "gpt_oss": LOCAL | {"num_attention_heads": 12, "head_dim": 32, "sliding_window": 128},
    "zaya": ZAYA | {"router_hidden_size": 16, "layer_types": ["hybrid"] * 4, "tie_word_embeddings": True},
}
NUMBERS = ("experts_agreement", "experts_agreement_fp16", "program_error")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--scratch", type=Path, help="where to write")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS], metavar="FAMILY")
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "tokens": args.tokens}
    for name in args.only:
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            found[name] = chosen(name, args.tokens, Path(folder))
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


def chosen(name: str, tokens: int, home: Path) -> dict[str, Any]:
    """Return what the gate of a model's layers measured."""
    write_synthetic_checkpoint(BASE | MODELS[name] | {"model_type": name}, home / "checkpoint", 0, tokenizer=DEMO)
    settings = {
        "model": name,
        "source": {"path": "checkpoint"},
        "context": tokens,
        "topology": [[0, BASE["num_hidden_layers"]]],
        "parity": {"text": "text.txt", "positions": tokens, "perplexity_positions": 8},
    }
    (home / "text.txt").write_text(long_text(tokens))
    rows = gate_rows(home, settings, [f"parity/layers_00_{BASE['num_hidden_layers']:02d}"])
    return {row["name"]: {"value": row["value"], "detail": row["detail"]} for row in rows if row["name"] in NUMBERS}


def long_text(tokens: int) -> str:
    """Return the parity text, again and again, until it has so many tokens."""
    text, tokenizer = TEXT.read_text(encoding="utf-8"), read_tokenizer(DEMO / "tokenizer.json")
    return text * (tokens // len(tokenizer.encode(text).ids) + 1)


if __name__ == "__main__":
    main()
