"""The `shardmill` command: how it fails, how it ends, and that it starts at once."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest
from reciter import failure, reciting, shardmill

from shardmill import cli
from shardmill.commands import arguments as shared
from shardmill.errors import ShardmillError
from shardmill.machine import is_portable
from shardmill.runtime import process

HEAVY = ("torch", "coremltools", "transformers", "numpy", "tokenizers", "snakemake", "huggingface_hub", "pydantic")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a built model."""
    return reciting(tmp_path / "demo", monkeypatch)


def test_the_help_names_every_drafter_and_policy() -> None:
    """What can be asked for is what --help says."""
    from drafted_decoding import DRAFTERS, POLICIES

    assert set(re.findall(r"\w+", shared.DRAFTERS)) - {"or"} == set(DRAFTERS)
    assert set(re.findall(r"\w+", shared.POLICIES)) - {"or"} == set(POLICIES)


def test_a_wrong_command_line_is_exit_code_2(build: Path) -> None:
    """Usage errors, ours and typer's, are told apart from failures by the exit code."""
    for arguments in (
        ["generate", build],
        ["generate", build, "--prompt", "a", "--prompt-file", "b"],
        ["generate", build, "--prompt", "a", "--draft-build", build],
        ["generate", build, "--prompt", "a", "--max-new-tokens", 0],
        ["generate", build, "--prompt", "a", "--temperature", -1],
        ["generate"],
        ["no-such-command"],
    ):
        result = shardmill(*arguments)
        assert result.exit_code == 2, arguments
        assert "Traceback" not in result.output


def test_failures_are_one_line(build: Path, tmp_path: Path) -> None:
    """What a user can get wrong is one line that names the thing."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "empty.txt"
    empty.touch()
    for file, why in ((empty, "holds no text"), (tmp_path / "none.txt", "No such file")):
        said = why if is_portable() else "does not run on a Mac"
        assert said in failure("audit-range", build, "--prompts", file)
    nothing = failure("generate", tmp_path / "none", "--prompt", "a")
    assert nothing.endswith("build the model first: snakemake --cores 4 all --configfile CONFIG")
    config = Path(__file__).parents[1] / "configs/demo.yaml"
    assert failure("serve", config) == f"{config}: is a file; name the folder of a build, such as build/demo"
    assert f"{build}: is a build; name one of its programs, such as {build}/packages/" in failure("lint", build)
    assert "no drafter is called 'foo'" in failure("generate", build, "--prompt", "a", "--drafter", "foo")
    assert "the prompt is empty" in failure("generate", build, "--prompt", "")
    too_long = failure("generate", build, "--prompt", "a" * 300)
    assert "the context 256" in too_long and "context_policy" not in too_long
    assert "finite" in failure("generate", build, "--prompt", "a", "--temperature", "inf")
    assert "No such file" in failure("synth-checkpoint", tmp_path / "new", "--like", tmp_path / "none.yaml")
    assert "No such file" in failure("generate", build, "--prompt-file", tmp_path / "none.txt")
    assert "not UTF-8" in failure("generate", build, "--prompt-file", binary)
    assert "no such file or folder" in failure("inspect", tmp_path / "none.mlpackage")


def test_what_is_wrong_is_said_before_a_model_is_loaded(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes minutes on a device, and nothing of it is needed to know."""
    monkeypatch.setattr(process, "load_engine", raising(AssertionError("loaded")))
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.json").write_text(json.dumps(manifest(vocab=300)))
    prompt = ("--prompt", "a")
    drafting_with = (*prompt, "--drafter", "draft_model", "--draft-build")
    for options, says in {
        ("--prompt", ""): "the prompt is empty",
        ("--prompt", "a" * 300): "the prompt has 300 tokens, the context 256",
        ("--prompt", "\udcff"): "the prompt is not UTF-8 text",
        (*prompt, "--seed", str(2**64)): "seed is",
        (*prompt, "--policy", "often"): "no draft policy is called 'often'",
        (*prompt, "--drafter", "draft_model"): "name a second build with --draft-build",
        (*drafting_with, tmp_path / "none"): "none/model.json can't be read",
        (*drafting_with, other): "the draft model has 300 tokens, the model 257",
    }.items():
        assert says in failure("generate", build, *options)
    assert shardmill("generate", build, *prompt, "--draft-build", build).exit_code == 2
    assert "draft model has 300 tokens" in failure("chat", build, "--drafter", "draft_model", "--draft-build", other)
    assert "--system is not UTF-8 text" in failure("chat", build, "--system", "\udcff")
    assert shardmill("chat", build, "--system", "Be brief.").exit_code == 2  # no chat template
    assert "draft model has 300 tokens" in failure("serve", build, "--draft-build", other)
    assert "draft model has 300 tokens" in failure("bench", build, "--draft", other)


def test_bytes_that_are_no_text_are_named(build: Path) -> None:
    """A shell hands over any bytes; Python hides those that are no UTF-8 in surrogates, which no tokenizer takes."""
    code = "from shardmill.cli import main; main()"
    for arguments, stdin in ((["--prompt", b"\xff"], b""), (["--prompt-file", "-"], b"\xff")):
        command = [sys.executable, "-c", code, "generate", str(build), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
        assert done.returncode == 1 and b"is not UTF-8 text" in done.stderr
        assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"parts": []}'])
def test_a_damaged_manifest_is_named(build: Path, content: str) -> None:
    """model.json that is no JSON, or not ours, is named; nothing is loaded by it."""
    (build / "model.json").write_text(content)
    assert str(build / "model.json") in failure("generate", build, "--prompt", "a")


def test_a_damaged_tokenizer_is_named(build: Path) -> None:
    """The tokenizers library raises a bare Exception; the line names the file."""
    (build / "source/tokenizer.json").write_text("{}")
    assert str(build / "source/tokenizer.json") in failure("generate", build, "--prompt", "a")


def raising(error: BaseException) -> Any:
    """A function that raises `error`."""

    def fail(*_: object) -> Any:
        raise error

    return fail


def test_an_unexpected_error_is_one_line_too(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug shows its type, what it said on one line, and how to see more; an expected error has no such hint."""
    monkeypatch.setattr(process, "load_engine", raising(KeyError("some\nthing")))
    line = failure("generate", build, "--prompt", "a")
    assert line.startswith("KeyError: ")
    assert line.endswith(cli.HINT)
    closed = PermissionError(errno.EACCES, "Permission denied", "build/x")
    monkeypatch.setattr(process, "load_engine", raising(closed))
    assert failure("generate", build, "--prompt", "a") == "build/x: Permission denied"
    monkeypatch.setattr(process, "load_engine", raising(ShardmillError("gone;\n try again")))
    assert failure("generate", build, "--prompt", "a") == "gone; try again"


def test_a_traceback_on_demand(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--traceback lets every error through as it is."""
    error = ShardmillError("gone")
    monkeypatch.setattr(process, "load_engine", raising(error))
    assert shardmill("--traceback", "generate", build, "--prompt", "a").exception is error


def test_ctrl_c_is_quiet(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with 130, as shells expect, and one line."""
    monkeypatch.setattr(process, "load_engine", raising(KeyboardInterrupt()))
    result = shardmill("generate", build, "--prompt", "a")
    assert result.exit_code == 130
    assert result.output == "shardmill: interrupted\n"


def test_an_error_that_an_interrupt_made_is_no_error(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library swallows Ctrl-C while it is imported, and is half there afterwards."""
    monkeypatch.setattr(cli.interrupt, "happened", lambda: True)
    monkeypatch.setattr(process, "load_engine", raising(RuntimeError("Only a single TORCH_LIBRARY")))
    result = shardmill("generate", build, "--prompt", "a")
    assert (result.exit_code, result.output) == (130, "shardmill: interrupted\n")


def test_a_closed_pipe_is_no_error(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shardmill ... | head` ends without a message."""
    monkeypatch.setattr(process, "load_engine", raising(BrokenPipeError(32, "Broken pipe")))
    assert "shardmill:" not in shardmill("generate", build, "--prompt", "a").output


def test_starts_without_anything_heavy() -> None:
    """--help and --version must not wait for torch: nothing heavy is imported before a command runs."""
    code = (
        "import sys\n"
        "from shardmill import cli\n"
        "from typer.testing import CliRunner\n"
        "result = CliRunner().invoke(cli.app, ['--help'])\n"
        "assert result.exit_code == 0 and 'generate' in result.output, result.output\n"
        f"print(sorted(set({HEAVY!r}) & sys.modules.keys()))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_version_is_the_distribution_s() -> None:
    """--version says what pip installed."""
    from importlib.metadata import version

    assert shardmill("--version").stdout == f"shardmill {version('shardmill')}\n"
