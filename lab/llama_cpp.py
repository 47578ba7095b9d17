"""Measures decode and prefill beside llama.cpp, which computes with the same checkpoint in Q8_0 on the same threads.

    pip install xllamacpp gguf
    python lab/llama_cpp.py build/qwen2.5-coder-0.5b --gguf model.gguf --threads 2

`model.gguf` is the checkpoint in any of llama.cpp's forms; matrices are brought to Q8_0 first, in a file beside it. The
two take turns. Prints one JSON object: milliseconds for a token, the best of the turns, and ratios to llama.cpp's.

llama.cpp rounds activations to 8 bits in blocks of 32 and the cache to fp16. The portable engine shows what a program
computes, so it rounds neither. xllamacpp (PyPI) has llama.cpp built for processors from AVX2 on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import portable_coreml
import torch

from shardmill.runtime.engine import load

PROMPT, ANSWER = 512, 32
Times = tuple[float, float]  # milliseconds for a token of the prompt, and of the answer


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runs = {"portable": ours(args.build), "llama_cpp": theirs(in_q8(args.gguf), args.threads)}
    best = dict.fromkeys(runs, (math.inf, math.inf))
    for _ in range(args.turns):
        for name, run in runs.items():
            prompt, answer = run()
            best[name] = min(best[name][0], prompt), min(best[name][1], answer)
    report: dict[str, Any] = {"threads": args.threads}
    for index, what in enumerate((f"of_a_prompt_of_{PROMPT}", "of_the_answer")):
        report |= {f"{name}_{what}_ms": round(times[index], 2) for name, times in best.items()}
        report[f"{what}_ratio"] = round(best["portable"][index] / best["llama_cpp"][index], 2)
    print(json.dumps(report, indent=2))


def ours(build: Path) -> Callable[[], Times]:
    """Return a run of the portable engine in fp32, by the widest passes of the build."""
    portable_coreml.install("fp32")
    engine = load(build, "fp32")

    def run() -> Times:
        start = time.perf_counter()
        for at in range(0, PROMPT, engine.tokens_max):
            places = range(at, min(PROMPT, at + engine.tokens_max))
            hidden = engine.hidden([1000 + place for place in places], places, places)
        logits, middle = engine.logits(hidden), time.perf_counter()
        for place in range(PROMPT, PROMPT + ANSWER):
            logits = engine.forward([int(logits[-1].argmax())], [place], [place])
        return (middle - start) * 1e3 / PROMPT, (time.perf_counter() - middle) * 1e3 / ANSWER

    return run


def theirs(gguf: Path, threads: int) -> Callable[[], Times]:
    """Return a run of llama.cpp."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(gguf), 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    request = {"prompt": list(range(1000, 1000 + PROMPT)), "n_predict": ANSWER, "temperature": 0, "ignore_eos": True}

    def run() -> Times:
        answer = server.handle_completions({**request, "cache_prompt": False})
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        return timings["prompt_per_token_ms"], timings["predicted_per_token_ms"]

    return run


def in_q8(source: Path) -> Path:
    """Return a GGUF file whose matrices are in Q8_0, made beside the source if it is not there."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    made = source.with_suffix(".q8_0.gguf")
    if made.exists():
        return made
    reader = GGUFReader(source)
    writer = GGUFWriter(made.with_suffix(".part"), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 2:
            packed = quants.quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, values)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    made.with_suffix(".part").rename(made)
    return made


if __name__ == "__main__":
    main()
