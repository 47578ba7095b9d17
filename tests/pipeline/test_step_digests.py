"""What the digest of each step depends on in the real library: no code that it can't reach.

That all the code counts which a step runs is shown by test_code_mutants.py, for the steps of its build.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.pipeline import code_digest
from shardmill.pipeline.code_digest import Module, data_of, parse_module
from shardmill.pipeline.needs import STEPS

# Steps of which the build has no job whose imports test_code_mutants.py looks at.
REACHED = {
    "benchmark": [
        "shardmill/bench/speed.py",
        "shardmill/runtime/engine.py",
        "drafted_decoding/session.py",
        "portable_coreml/run/execute.py",
    ],
    "report": ["shardmill/gates/thresholds.py", "shardmill/report/__init__.py"],
}
SPARED = {
    "convert": [
        "drafted_decoding/session.py",
        "shardmill/gates/parity.py",
        "shardmill/runtime/engine.py",
        "shardmill/runtime/kv.py",
        "shardmill/bench/speed.py",
        "shardmill/cli.py",
        "portable_coreml/run/execute.py",
    ],
    "split": ["shardmill/convert/trace.py", "shardmill/gates/parity.py", "drafted_decoding/session.py"],
    "reference": ["shardmill/convert/trace.py", "drafted_decoding/session.py", "shardmill/bench/speed.py"],
    "parity": [
        "drafted_decoding/session.py",
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
        return {name: code_digest.tools(step, family)["code"] for name, step in STEPS.items()}

    def changed(self, file: str, old: str, new: str, family: str) -> set[str]:
        """The steps whose digests differ after an edit, which is undone."""
        before, path = self.digests(family), self.root / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new, 1))
        after = self.digests(family)
        path.write_text(text)
        return {name for name in STEPS if after[name] != before[name]}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    root = tmp_path_factory.mktemp("library")
    copy = Copy(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_digest, "OURS", dict.fromkeys(code_digest.OURS, root))
        patch.setattr(code_digest, "read_module", copy.read_module)
        code_digest.module_file.cache_clear()
        yield copy
    code_digest.module_file.cache_clear()


# Edits of where programs' weights come from, with the family whose builds they change.
MAPPINGS: dict[str, tuple[str, str, str, str]] = {
    "which tensor": ("families/hunyuan_v1_dense.py", "query_layernorm", "key_layernorm", "hunyuan_v1_dense"),
    "which rows": ("decoder.py", "(first + 1, first + turning, 2)", "(first, first + turning, 2)", "glm4"),
    "which way round": ("experts.py", "transposed=True", "transposed=False", "granitemoe"),
    "which matrix of a stack": ("experts.py", "index=i, rows", "index=0, rows", "qwen3_moe"),
    "of which shape": ("experts.py", "(e.count, 2 * e.ffn, hidden)", "(e.count, hidden, 2 * e.ffn)", "qwen3_moe"),
}


@pytest.mark.thorough(but=["which tensor", "which way round"])
@pytest.mark.parametrize("kind", MAPPINGS)
def test_an_edit_of_where_weights_come_from_converts_again(kind: str, library: Copy) -> None:
    file, old, new, family = MAPPINGS[kind]
    assert "split" in library.changed(f"shardmill/models/{file}", old, new, family)
