"""Compare the speed of this folder's portable engine and reference with the speed of another checkout.

    python benchmarks/engine_against.py --against FOLDER_OF_ANOTHER_CHECKOUT [--repeats 3]

Programs and checkpoints are made once, by this folder's code. Each measurement is a separate process with one thread;
the two checkouts take turns. Printed are the best of --repeats, in milliseconds, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests"))

import coremltools as ct  # noqa: E402
import coremltools.optimize.coreml as cto  # noqa: E402
import numpy as np  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402

TIMED = """
import sys, time
def best(work, repeats=9):
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return 1000 * min(found)
"""
PASS = (
    TIMED
    + """
import numpy as np, portable_coreml, torch
portable_coreml.install("fp32"); torch.set_num_threads(1)
import coremltools as ct
model, inputs = ct.models.MLModel(sys.argv[1]), dict(np.load(sys.argv[2]))
state = model.make_state() if sys.argv[3] == "stateful" else None
print(best(lambda: model.predict(inputs, state=state)))
"""
)
LOAD = (
    TIMED
    + """
import portable_coreml; portable_coreml.install("fp32")
import coremltools as ct
names, held = sys.argv[2].split(","), []
print(best(lambda: held.__setitem__(slice(None), [ct.models.MLModel(sys.argv[1], function_name=n) for n in names]), 3))
"""
)
ROTARY = (
    TIMED
    + """
import torch; torch.set_num_threads(1)
from pathlib import Path
from shardmill.gates.reference import Reference
reference = Reference(Path(sys.argv[1]), int(sys.argv[2]))
(rotary,) = (m for m in reference.model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
x, positions = torch.zeros(1, 64, 96), torch.arange(64)[None]
print(best(lambda: rotary(x, positions)))
"""
)


def matmul(out: int, width: int, most: int, path: Path) -> Path:
    """Write a program that multiplies an int8 matrix [out, width] with 1 to `most` columns."""
    layer = torch.nn.Conv2d(width, out, 1, bias=False).eval()
    x = ct.TensorType("x", (1, width, ct.RangeDim(1, most, default=1), 1), np.float16)
    traced = torch.jit.trace(layer, torch.zeros(1, width, 1, 1))
    model = ct.convert(
        traced, inputs=[x], outputs=[ct.TensorType("y", dtype=np.float16)], skip_model_load=True, **IOS18
    )
    config = cto.OptimizationConfig(global_config=cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8"))
    cto.linear_quantize_weights(model, config).save(str(path))
    return path


IOS18: dict[str, Any] = {"minimum_deployment_target": ct.target.iOS18}


def functions(count: int, path: Path) -> str:
    """Write a program of `count` functions with the same small int8 matrices; return the functions' names."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(512, 512, 1, bias=False) for _ in range(40)]
    descriptor = ct.utils.MultiFunctionDescriptor()
    names = [f"t{i + 1}" for i in range(count)]
    config = cto.OptimizationConfig(global_config=cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8"))
    for i, name in enumerate(names):
        traced = torch.jit.trace(torch.nn.Sequential(*layers).eval(), torch.zeros(1, 512, i + 1, 1))
        x = ct.TensorType("x", (1, 512, i + 1, 1), np.float16)
        one = ct.convert(
            traced, inputs=[x], outputs=[ct.TensorType("y", dtype=np.float16)], skip_model_load=True, **IOS18
        )
        cto.linear_quantize_weights(one, config).save(str(path.with_name(f"{name}.mlpackage")))
        descriptor.add_function(str(path.with_name(f"{name}.mlpackage")), "main", name)
    descriptor.default_function_name = names[0]
    ct.utils.save_multifunction(descriptor, str(path))
    return ",".join(names)


def measure(code: Path, text: str, *args: object) -> float:
    """Return what a process with the code of a checkout prints."""
    environment = os.environ | {"PYTHONPATH": f"{code}:{code / 'portable'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", text, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=code)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    rows: list[tuple[str, str, tuple[object, ...]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for out, width, most, tokens in ((3072, 3072, 512, (128, 512)), (1024, 1024, 4, (1, 4))):
            package = matmul(out, width, most, folder / f"{out}.mlpackage")
            for count in tokens:
                x = np.random.default_rng(0).standard_normal((1, width, count, 1)).astype(np.float32)
                np.savez(folder / f"{out}-{count}.npz", x=x)
                rows.append((f"int8 {out} x {width}, T = {count}", PASS, (package, folder / f"{out}-{count}.npz", "")))
        names = functions(4, folder / "four.mlpackage")
        rows.append(
            ("load of 4 functions with 40 int8 matrices of 512 x 512", LOAD, (folder / "four.mlpackage", names))
        )
        source = tiny.fetched(tiny.write_checkpoint(folder / "checkpoint"), folder / "source")
        rows += [(f"rotary tables of a reference, context {c:,}", ROTARY, (source, c)) for c in (8192, 131072)]
        print(f"{'':<56}{'other':>9}{'here':>9}{'times':>7}", flush=True)
        for name, text, args in rows:
            found = [[measure(code, text, *args) for code in (asked.against, HERE)] for _ in range(asked.repeats)]
            other, here = (min(times) for times in zip(*found, strict=True))
            print(f"{name:<56}{other:>9.2f}{here:>9.2f}{other / here:>7.1f}", flush=True)


if __name__ == "__main__":
    main()
