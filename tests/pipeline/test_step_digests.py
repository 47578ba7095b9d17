"""What the digest of each step depends on in the real library: all the code that it can reach, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.pipeline import code_digest
from shardmill.pipeline.code_digest import Module, data_of, parse_module
from shardmill.pipeline.table import STEPS

REACHED = {
    "convert": [
        "shardmill/models/blocks.py",
        "shardmill/models/primitives.py",
        "shardmill/convert/weights.py",
        "shardmill/convert/package.py",
        "shardmill/plan.py",
    ],
    "split": [
        "shardmill/models/families/phi3.py",
        "shardmill/checkpoint/headers.py",
        "shardmill/checkpoint/headers.py",
        "shardmill/plan.py",
        "shardmill/config/model.py",
    ],
    "parity": [
        "shardmill/gates/thresholds.py",
        "shardmill/gates/passes.py",
        "shardmill/models/contract.py",
        "shardmill/models/host.py",
        "shardmill/runtime/program.py",
        "portable_coreml/run/execute.py",
        "portable_coreml/files/bundle.py",
    ],
    "residency": [
        "shardmill/gates/residency.py",
        "shardmill/gates/thresholds.py",
        "portable_coreml/files/read_proto.py",
    ],
    "compile": ["portable_coreml/files/bundle.py", "portable_coreml/files/write_text.py"],
    "reference": ["shardmill/gates/reference.py", "shardmill/convert/weights.py"],
    "benchmark": [
        "shardmill/bench/speed.py",
        "shardmill/runtime/engine.py",
        "shardmill/decode/session.py",
        "portable_coreml/run/execute.py",
    ],
}
SPARED = {
    "convert": [
        "shardmill/decode/session.py",
        "shardmill/gates/parity.py",
        "shardmill/runtime/engine.py",
        "shardmill/models/host.py",
        "shardmill/bench/speed.py",
        "shardmill/cli.py",
        "portable_coreml/run/execute.py",
    ],
    "split": ["shardmill/convert/trace.py", "shardmill/gates/parity.py", "shardmill/decode/session.py"],
    "reference": ["shardmill/convert/trace.py", "shardmill/decode/session.py", "shardmill/bench/speed.py"],
    "parity": [
        "shardmill/decode/session.py",
        "shardmill/gates/stack.py",
        "shardmill/bench/speed.py",
        "shardmill/cli.py",
    ],
    "parity_stack": ["shardmill/bench/speed.py", "shardmill/serve/engine_worker.py", "shardmill/cli.py"],
    "embedding": ["shardmill/gates/parity.py", "shardmill/convert/trace.py", "shardmill/models/primitives.py"],
}


def relative(file: Path) -> str:
    """A module's file from the folder that its package lies in."""
    return next(file.relative_to(root).as_posix() for root in code_digest.OURS.values() if file.is_relative_to(root))


def files_read(step: str) -> set[str]:
    """The library's files whose code enters a step's digest."""
    row = STEPS[step]
    return {relative(file) for file in code_digest.closure(code_digest.modules(row), "phi3").values()}


@pytest.mark.parametrize("step", REACHED)
def test_a_step_works_again_when_code_it_uses_changes(step: str) -> None:
    assert set(REACHED[step]) - files_read(step) == set()


@pytest.mark.parametrize("step", SPARED)
def test_a_step_is_left_alone_when_other_code_changes(step: str) -> None:
    assert all((code_digest.OURS[file.split("/")[0]] / file).is_file() for file in SPARED[step])
    assert set(SPARED[step]) & files_read(step) == set()


LOADED = """
import json, sys
from pathlib import Path
import shardmill.pipeline.steps.{step}
for name in {heavy!r}:
    __import__(name)
print(json.dumps([m for m in sys.modules if m.split(".")[0] in ("shardmill", "portable_coreml")]))
"""
# What a step's `work` imports at first, so that these modules bring in whatever they need.
HEAVY = {
    "convert": [
        "shardmill.convert.package",
        "shardmill.convert.trace",
        "shardmill.convert.weights",
    ],
    "parity": ["shardmill.gates.parity", "portable_coreml.proxy", "shardmill.runtime.program"],
    "parity_stack": ["shardmill.gates.stack", "portable_coreml.proxy", "shardmill.runtime.engine"],
}


@pytest.mark.parametrize("step", HEAVY)
def test_the_closure_covers_whatever_python_loads(step: str) -> None:
    """Python itself is asked what the step's modules import."""
    command = [sys.executable, "-c", LOADED.format(step=step, heavy=HEAVY[step])]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {"shardmill.pipeline.task", HEAVY[step][0]} <= set(loaded)
    sources = {code_digest.module_file(name) for name in loaded}
    names = {relative(file) for file in sources if file}
    assert names - files_read(step) == set()


class Copy:
    """A copy of the library that may be edited; digests are those of its steps."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, folder in code_digest.OURS.items():
            shutil.copytree(folder / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.known: dict[tuple[str, bytes, bytes], Module] = {}

    def read_module(self, file: Path) -> Module:
        """Reads a file again only if it is another."""
        given = (file.read_bytes(), data_of(file))
        state = (str(file), *given)
        if state not in self.known:
            self.known[state] = parse_module(file, *given)
        return self.known[state]

    def digests(self, family: str) -> dict[str, str]:
        code_digest.module_file.cache_clear()  # one may be new
        return {name: code_digest.tools(step, family)["code"] for name, step in STEPS.items()}

    def changed(self, file: str, old: str, new: str, family: str = "phi3") -> set[str]:
        """The steps whose digests differ after an edit, which is undone. Without `old` the file is new, or longer."""
        before, path = self.digests(family), self.root / file
        text = path.read_text() if path.exists() else ""
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new, 1) if old else text + new)
        after = self.digests(family)
        path.write_text(text) if text else path.unlink()
        return {name for name in STEPS if after[name] != before[name]}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    root = tmp_path_factory.mktemp("library")
    copy = Copy(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_digest, "OURS", dict.fromkeys(code_digest.OURS, root))
        patch.setattr(code_digest, "read_module", copy.read_module)
        yield copy
    code_digest.module_file.cache_clear()


RULE = "portable_coreml/judge/rules/weights.py"
DRAFTERS = "shardmill/decode/drafters/__init__.py"
# What is edited, and the steps whose digests it changes: no other can have another result.
EVERY = set(STEPS)
LOADING = {
    "compile",
    "residency",
    "parity",
    "parity_stack",
    "witness",
    "predicted",
    "benchmark",
}  # programs, with Core ML or in its place
REFERRED = {"reference", "parity", "parity_stack", "witness", "predicted"}
JUDGED = LOADING | {"split", "report"}  # by the rules of placement
EDITS: dict[str, tuple[str, str, str, set[str]]] = {
    "a comment": ("shardmill/convert/stamped.py", "import tempfile", "import tempfile  # why", set()),
    "a docstring": ("shardmill/plan.py", '"""The plan:', '"""All of the plan:', set()),
    "a log text": ("shardmill/pipeline/steps/fetch.py", "%d files at %s", "%d files, %s", {"fetch"}),
    "an error's text": ("shardmill/pipeline/steps/reference.py", "no tokenizer", "not a tokenizer", REFERRED),
    "a new error": ("shardmill/errors.py", "", "\n\nclass NewError(ShardmillError):\n    pass\n", EVERY),
    "a help text": ("shardmill/commands/serve.py", "Address to listen on.", "The address.", set()),
    "a new family": ("shardmill/models/families/newfamily.py", "", "x = 1\n", set()),
    "a new command": ("shardmill/commands/extra.py", "", "x = 1\n", set()),
    "a rule's source": (RULE, "pull request 2593, issue 1807", "pull request 2593", JUDGED),
    "a rule's remedy": (RULE, "split the layers over more programs", "cut it into more programs", JUDGED),
    "a rule's condition": (
        RULE,
        "subject.weight_bytes > MAX_WEIGHT_BYTES",
        "subject.weight_bytes >= MAX_WEIGHT_BYTES",
        JUDGED,
    ),
    "a new drafter": (
        DRAFTERS,
        "",
        "\nfrom shardmill.decode.drafters.base import NoDrafter as Other\n",
        {"parity_stack", "predicted", "benchmark"},
    ),
    "the converter": ("shardmill/convert/stamped.py", "", "\nx = 1\n", {"convert"}),
    "the embedding": ("shardmill/convert/table.py", "", "\nx = 1\n", {"embedding"}),
    "a primitive": ("shardmill/models/primitives.py", "", "\nx = 1\n", {"convert", "witness"}),
    "the family": ("shardmill/models/families/phi3.py", "", "\nx = 1\n", {"split"}),
    "the host's masks": (
        "shardmill/models/host.py",
        "",
        "\nx = 1\n",
        {"parity", "parity_stack", "witness", "predicted", "benchmark"},
    ),
    "a gate": ("shardmill/gates/parity.py", "", "\nx = 1\n", {"parity", "parity_stack", "witness", "predicted"}),
    "a threshold": (
        "shardmill/gates/thresholds.py",
        "1e-4",
        "2e-4",
        {"residency", "parity", "parity_stack", "witness", "predicted", "report"},
    ),
    "the server": ("shardmill/serve/engine_worker.py", "", "\nx = 1\n", {"benchmark"}),
    "the page": ("shardmill/report/templates/head.html", "", "<p>", {"report"}),
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_changes_the_digests_of_the_steps_that_it_can_change(kind: str, library: Copy) -> None:
    file, old, new, steps = EDITS[kind]
    assert library.changed(file, old, new) == steps


# Edits of where programs' weights come from, with the family whose builds they change.
MAPPINGS: dict[str, tuple[str, str, str, str]] = {
    "which tensor": ("families/hunyuan_v1_dense.py", "query_layernorm", "key_layernorm", "hunyuan_v1_dense"),
    "which rows": ("decoder.py", "(first + 1, first + turning, 2)", "(first, first + turning, 2)", "glm4"),
    "which way round": ("experts.py", "transposed=True", "transposed=False", "granitemoe"),
    "which matrix of a stack": ("experts.py", "index=i, rows", "index=0, rows", "qwen3_moe"),
    "of which shape": ("experts.py", "(e.count, 2 * e.ffn, hidden)", "(e.count, hidden, 2 * e.ffn)", "qwen3_moe"),
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_an_edit_of_where_weights_come_from_converts_again(kind: str, library: Copy) -> None:
    file, old, new, family = MAPPINGS[kind]
    assert "split" in library.changed(f"shardmill/models/{file}", old, new, family)
