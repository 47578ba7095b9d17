"""What the job of each step needs that is no file: memory, packages, and a config that asks for it.

What a step takes and makes is in its rule, in rules/*.smk, which has the step's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError
from shardmill.pipeline import options
from shardmill.pipeline.resources import NOTHING, Need
from shardmill.pipeline.task import Task

if TYPE_CHECKING:
    from shardmill.config import Config


@dataclass(frozen=True)
class Step:
    """One row.

    Attributes:
        name: the name of the step, of its rule, and of its module in `pipeline/steps/`.
        needs: the memory of a job.
        each_thread: the memory of every thread after the first.
        packages: distributions whose versions decide the result.
        exact: whether every build of torch gives the same result. Then its key has torch's public version, 2.13.0. The
            key of a step whose numbers are sums has the build, too: 2.13.0+cpu may add up in another order.
        also: modules that the step runs in another process.
        forks: whether a job may be a fork of a process that has imported coremltools, torch and transformers.
        wanted: whether the build of a config has the step; None if every build has it.
    """

    name: str
    needs: Need
    each_thread: Need = NOTHING
    packages: tuple[str, ...] = ()
    exact: bool = False
    also: tuple[str, ...] = ()
    forks: bool = False
    wanted: Callable[[Config], bool] | None = None

    @property
    def module(self) -> str:
        """Return the step's module; its code, and the code of all modules that it imports, decide the result."""
        return f"shardmill.pipeline.steps.{self.name}"

    @property
    def task(self) -> Callable[..., Task]:
        """Return the function that describes a job. Its parameters are the inputs and parameters of the step's rule."""
        describe: Callable[..., Task] = import_module(self.module).task
        return describe


TEXTS = ("numpy", "safetensors", "tokenizers", "torch", "transformers")
CODES = ("coremltools", "numpy", "safetensors", "torch", "transformers")
RUNS = (*CODES, "protobuf")
SERVES = ("fastapi", "httpx2", "pillow", "pydantic", "starlette", "uvicorn")
_ROWS = (
    # Torch merges an adapter. A tokenizer of 262,144 tokens takes 300 MB.
    Step("fetch", needs=Need(430, torch=1), packages=("huggingface-hub", "tokenizers", "torch", "transformers")),
    # A tokenizer, twice.
    Step("split", needs=Need(200, torch=1, vocab=2600), packages=("tokenizers", "transformers"), forks=True),
    Step(
        "calibration", needs=Need(880, torch=1, layer=4, table=2), packages=TEXTS, forks=True, wanted=options.calibrates
    ),
    Step("codes", needs=Need(780, torch=1, layer=8, largest=36), packages=CODES, forks=True, wanted=options.calibrates),
    Step(
        "sensitivity",
        needs=Need(580, torch=1, layer=8, largest=12, table=4, vocab=1500),
        each_thread=Need(260, largest=12, vocab=1100),
        packages=CODES,
        forks=True,
        wanted=options.searches,
    ),
    Step("search", needs=Need(400), packages=("numpy", "scipy"), wanted=options.searches),
    Step("original", needs=Need(880, torch=1, layer=4, table=2), packages=TEXTS, forks=True, wanted=options.measures),
    Step(
        "measured",
        needs=Need(1480, torch=1, layer=12, largest=12, table=2),
        packages=CODES,
        forks=True,
        wanted=options.measures,
    ),
    Step("precision", needs=Need(300)),
    # The weights in fp32, three times over.
    Step("reference", needs=Need(370, torch=1, whole=4, table=2, logits=12), packages=TEXTS, forks=True),
    Step("embedding", needs=Need(180, torch=1), packages=("numpy", "torch"), exact=True),
    # Blocks of rows, and templates of a bucket's size.
    Step(
        "convert",
        needs=Need(430, torch=1, part=0.05, bucket=900_000),
        packages=("coremltools", "numpy", "protobuf", "torch"),
        exact=True,
        forks=True,
    ),
    # Hidden states of a few tokens, and no logits but theirs.
    Step("expected", needs=Need(370, torch=1, layer=4, whole=3.5, table=4), packages=RUNS, forks=True),
    Step("compile", needs=Need(380), packages=("coremltools", "protobuf")),
    Step(
        "residency",
        needs=Need(380, torch=1),
        packages=("coremltools", "numpy", "protobuf", "torch"),
        forks=True,
    ),
    Step("parity", needs=Need(400, torch=1, part=2.5, whole=3.5, expanded=8, cached=8), packages=RUNS, forks=True),
    # A drafter's reference is in fp32, and its checkpoint is mapped.
    Step(
        "parity_stack",
        needs=Need(350, torch=1, model=2.4, drafter=6, whole=3.5, expanded=8, logits=12),
        packages=RUNS,
    ),
    Step(
        "witness",
        needs=Need(1380, torch=1, part=1.75, whole=3.5, expanded=8),
        packages=RUNS,
        wanted=options.witnesses,
    ),
    Step(
        "predicted",
        needs=Need(1080, torch=1, model=2.4, expanded=8, logits=12),
        packages=RUNS,
        forks=True,
        wanted=options.predicts,
    ),
    # Transformers renders conversations in a separate process.
    Step("manifest", needs=Need(380, torch=1), packages=("jinja2", "tokenizers", "transformers")),
    Step(
        "benchmark",
        needs=Need(320, torch=1, model=1.6, expanded=4, vocab=3200),
        packages=("coremltools", "numpy", "protobuf", "safetensors", "tokenizers", "torch", *SERVES),
        also=("shardmill.serve.server",),
        wanted=options.benchmarks,
    ),
    Step("provenance", needs=Need(300)),
    Step("report", needs=Need(500), packages=("jinja2", "markupsafe", "matplotlib")),
)
STEPS: dict[str, Step] = {row.name: row for row in _ROWS}


def step_of(rule: str) -> str:
    """Return the step of a rule by the rule's name.

    A batch numbers rules of one step (split_1), and a workflow with this one as a module may begin their names anew.
    """
    name = re.sub(r"_\d+$", "", rule)
    for step in sorted(STEPS, key=len, reverse=True):
        if f"_{name}".endswith(f"_{step}"):
            return step
    raise ShardmillError(f"{rule}: a rule has the name of its step, with words before it at most, as in theirs_convert")
