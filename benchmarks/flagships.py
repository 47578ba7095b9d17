"""Models at their real sizes with random weights: what a conversion takes, and whether the widest layers are right.

    python benchmarks/flagships.py --scratch /somewhere/with/40GB [--only gemma-3-4b ...] [--json results.json]

For each model, one after the other: a synthetic checkpoint; every part and the table converted, against `cp` of the
same bytes (benchmarks/convert.py); then the first layers, enough to hold every kind, through the pipeline up to their
parity gate. Run it on a quiet machine. Everything written is removed. The sizes are those of the published config.json
files; what they leave out is transformers' default.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from convert import Bench, machine
from scratch import ROOT, gate_rows

from shardmill.models.synthetic import write_synthetic_checkpoint

TOKENIZER = ROOT / "resources/demo"
CONTEXT = 256  # of the layers that are gated


def sizes(
    model_type: str, hidden: int, layers: int, heads: tuple[int, int], ffn: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """Return a config.json's content."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        **({"intermediate_size": ffn} if ffn else {}),
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **more,
    }


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Return the field `rope_parameters`."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
# Each with the number of first layers that hold every kind of its layers.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "lfm2-350m": (
        3,
        sizes("lfm2", 1024, 16, (16, 8), 6656, 65536, block_ff_dim=6656, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    ),
    "gemma-3-270m": (
        6,
        sizes("gemma3_text", 640, 18, (4, 1), 2048, 262144, head_dim=256, sliding_window=512),
    ),
    "llama-3.2-1b": (
        1,
        sizes("llama", 2048, 16, (32, 8), 8192, 128256, rms_norm_eps=1e-5, max_position_embeddings=131072)
        | rope(5e5, **LLAMA3),
    ),
    "olmo-2-1b": (
        1,
        sizes("olmo2", 2048, 16, (16, 16), 8192, 100352, max_position_embeddings=4096) | rope(5e5),
    ),
    "qwen2.5-1.5b": (
        1,
        sizes("qwen2", 1536, 28, (12, 2), 8960, 151936, rms_norm_eps=1e-6) | rope(1e6),
    ),
    "qwen3-1.7b": (
        1,
        sizes("qwen3", 2048, 28, (16, 8), 6144, 151936, head_dim=128, rms_norm_eps=1e-6) | rope(1e6),
    ),
    "hy-mt1.5-1.8b": (
        1,
        sizes("hunyuan_v1_dense", 2048, 32, (16, 4), 6144, 120818, head_dim=128, rms_norm_eps=1e-5)
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
    ),
    "granite-3.3-2b": (
        1,
        sizes("granite", 2048, 40, (32, 8), 8192, 49159, rms_norm_eps=1e-5) | GRANITE | rope(1e7),
    ),
    "gemma-2-2b": (
        2,
        sizes("gemma2", 2304, 26, (8, 4), 9216, 256000, head_dim=256, query_pre_attn_scalar=256),
    ),
    "smollm3-3b": (
        4,
        sizes("smollm3", 2048, 36, (16, 4), 11008, 128256, rms_norm_eps=1e-6, no_rope_layer_interval=4) | rope(5e6),
    ),
    "phi-4-mini": (1, json.loads((ROOT / "resources/phi-4-mini/config.json").read_text())),
    "granite-3.0-1b-a400m": (
        1,
        sizes("granitemoe", 1024, 24, (16, 8), 512, 49155, num_local_experts=32, num_experts_per_tok=8)
        | GRANITE
        | {"logits_scaling": 6.0}
        | rope(1e4),
    ),
    "zaya1-8b": (  # the first layer's router reads no state
        2,
        sizes("zaya", 2048, 40, (8, 2), 0, 262272, head_dim=128, moe_intermediate_size=2048, num_experts=16)
        | {"router_hidden_size": 256, "rms_norm_eps": 1e-5},
    ),
    "gemma-3-4b": (
        6,
        sizes("gemma3_text", 2560, 34, (8, 4), 10240, 262208, head_dim=256, sliding_window=1024)
        | {"rope_parameters": GEMMA3_ROPE},
    ),
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, help="where to write")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument("--groups", type=int, default=0, help="programs that a layer's experts are, if the host routes")
    parser.add_argument("--gates-only", action="store_true", help="convert nothing but the first layers")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    for name in args.only:
        whole = {} if args.gates_only else converted(name, args.scratch)
        found[name] = whole | gated(name, args.scratch, args.groups)
        print(name, json.dumps(found[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def converted(name: str, scratch: Path | None) -> dict[str, Any]:
    """Return seconds and memory of the whole model's conversion, against cp."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        source = Path(folder) / "checkpoint"
        write_synthetic_checkpoint(MODELS[name][1], source, 0, tokenizer=TOKENIZER)
        whole = Bench(source, Path(folder)).whole()
    peak = max(run["peak_mb"] for run in whole["runs"])
    return {key: whole[key] for key in ("bytes", "seconds", "cp_seconds", "ratio")} | {"peak_mb": peak}


def gated(name: str, scratch: Path | None, groups: int) -> dict[str, Any]:
    """Return what the parity gates measure of the first layers, at their real width.

    Args:
        name: of the model.
        scratch: where to write.
        groups: how many programs hold a layer's experts; 0 where they run in the layer's own.
    """
    count, content = MODELS[name]
    short = content | {"num_hidden_layers": count}
    if "full_attn_idxs" in content:
        short["full_attn_idxs"] = [i for i in content["full_attn_idxs"] if i < count]
    cuts = [[i, i + 1] for i in range(count)] if groups else [[0, count]]
    parts = [f"layers_{start:02d}_{end:02d}" for start, end in cuts]
    parts += [f"experts_{i:02d}_{j}" for i in range(count) for j in range(groups)]
    settings = {
        "model": name,
        "source": {"path": "checkpoint"},
        "context": CONTEXT,
        "topology": cuts,
        "parity": {"text": str(ROOT / "resources/text/parity.txt"), "positions": 16},
        **({"experts": groups} if groups else {}),
    }
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        write_synthetic_checkpoint(short, Path(folder) / "checkpoint", 0, tokenizer=TOKENIZER)
        rows = gate_rows(Path(folder), settings, [f"parity/{part}" for part in parts])
    worst: dict[str, float] = {}
    for row in rows:
        if row["name"] in ("program_error", "width_error", "rejected_draft_error", "experts_agreement"):
            keep = min if row["name"] == "experts_agreement" else max
            worst[row["name"]] = keep(row["value"], worst.get(row["name"], row["value"]))
    return {"layers": count, "groups": groups} | worst


if __name__ == "__main__":
    main()
