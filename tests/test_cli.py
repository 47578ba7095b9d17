"""The `shardmill` command: what it prints, how it fails, and that it starts at once."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import manifest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from shardmill import cli
from shardmill.commands import drafting, outcome
from shardmill.decode.drafters import BY_ITSELF
from shardmill.errors import ShardmillError
from shardmill.runtime import load

PROMPT, CONTINUATION = "def ", "naïve() → “é”  # 東京\n"
HEAVY = ("torch", "coremltools", "transformers", "numpy", "tokenizers", "snakemake", "huggingface_hub", "pydantic")


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every character outside ASCII is split; the last token is the end of the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


class Reciter:
    """An engine that knows one text by heart: after position p comes its token p + 1."""

    slots, widths, vocab = 256, (1, 4), 257

    def __init__(self, text: Sequence[int]) -> None:
        self.text = [*text, 256]

    def reset(self) -> None:
        """Nothing is held."""

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is held."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        """One-hot logits [T, V]."""
        following = [self.text[min(p + 1, len(self.text) - 1)] for p in positions]
        return np.eye(self.vocab, dtype=np.float32)[following]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a built model; its engine recites PROMPT + CONTINUATION."""
    folder = tmp_path / "demo"
    (folder / "source").mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "source/tokenizer.json"))
    (folder / "model.json").write_text(json.dumps(manifest()))
    engine = Reciter(tokenizer.encode(PROMPT + CONTINUATION).ids)
    monkeypatch.setattr(load, "load_engine", lambda *_: engine)
    return folder


def shardmill(*arguments: object, stdin: str | None = None) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def failure(*arguments: object) -> str:
    """The one line with which a command fails, exit code 1."""
    result = shardmill(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("shardmill: ")
    return result.stderr.removeprefix("shardmill: ").rstrip()


def test_generates_text_and_says_what_it_took(build: Path) -> None:
    """stdout holds the text and nothing else, the figures go to stderr."""
    result = shardmill("generate", build, "--prompt", PROMPT)
    assert result.exit_code == 0, result.output
    assert result.stdout == CONTINUATION + "\n"
    tokens = len(CONTINUATION.encode()) + 1  # and the end of the text
    assert f"[{tokens} tokens in " in result.stderr
    assert "drafted tokens accepted" in result.stderr


def test_streams_whole_characters(build: Path) -> None:
    """Text is written piece by piece, never half a character, and every piece as soon as its last byte is there."""
    from shardmill.decode import Options, Session, generate

    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode(PROMPT).ids
    written: list[str] = []

    class Out:
        write = staticmethod(written.append)
        flush = staticmethod(lambda: None)

    session = Session(load.load_engine(build, "fp32"))
    options = Options(detokenize=tokenizer.decode)
    result = outcome.consume(generate(session, prompt, max_new_tokens=100, eos=[256], options=options), Out())
    assert written == list(CONTINUATION)
    assert result.text == CONTINUATION


def test_an_unfinished_character_at_the_end_is_shown_as_such(build: Path) -> None:
    """Generation that stops inside a character loses nothing of what came before it."""
    result = shardmill("generate", build, "--prompt", PROMPT, "--max-new-tokens", 3)  # n, a, half of ï
    assert result.stdout == "na\ufffd\n"


def test_the_end_is_explained(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that stops short of what was asked for says why."""
    assert "the model ended the text" in shardmill("generate", build, "--prompt", PROMPT).stderr
    assert "--max-new-tokens reached" in shardmill("generate", build, "--prompt", PROMPT, "--max-new-tokens", 3).stderr
    monkeypatch.setattr(load, "load_engine", lambda *_: Reciter(byte_tokenizer().encode("a" * 400).ids))
    assert "the context is full" in shardmill("generate", build, "--prompt", "a" * 250).stderr


def test_json_has_what_the_design_promises(build: Path) -> None:
    """--json prints one object: the tokens, the text they are, and what they took."""
    result = shardmill("generate", build, "--prompt", PROMPT, "--drafter", "none", "--json")
    content = json.loads(result.stdout)
    assert result.stderr == ""
    assert content["tokens"] == [*byte_tokenizer().encode(CONTINUATION).ids, 256]
    assert content["text"] == CONTINUATION
    assert content["passes"] == len(content["tokens"]) - 1
    assert content["accepted"] == [0] * content["passes"]
    assert content["finish_reason"] == "eos"
    assert content["prefill_tok_s"] > 0
    assert content["decode_tok_s"] > 0
    assert content["engine"] in ("portable", "coreml")


def test_a_speed_that_was_not_measured_is_null(build: Path) -> None:
    """A single token comes out of the prefill: there is no decode speed, and none is made up."""
    content = json.loads(shardmill("generate", build, "--prompt", PROMPT, "--max-new-tokens", 1, "--json").stdout)
    assert content["decode_tok_s"] is None
    assert content["passes"] == 0


@pytest.mark.parametrize("drafter", BY_ITSELF)
def test_drafters_give_the_same_text(build: Path, drafter: str) -> None:
    """A drafter changes how fast text comes, never which."""
    assert shardmill("generate", build, "--prompt", PROMPT, "--drafter", drafter).stdout == CONTINUATION + "\n"


def test_a_draft_model_drafts(build: Path) -> None:
    """--draft-build names the draft model; here it is the model itself, so what it drafts is accepted."""
    arguments = ("generate", build, "--prompt", PROMPT, "--drafter", "draft_model", "--json")
    assert "name a second build with --draft-build" in failure(*arguments)
    content = json.loads(shardmill(*arguments, "--draft-build", build).stdout)
    assert content["text"] == CONTINUATION
    assert sum(content["accepted"]) > 0


def test_a_sliding_context_goes_on(build: Path) -> None:
    """Past what the context holds, and after a prompt that is longer; too small a context is refused unloaded."""
    slide = ("generate", build, "--context-policy", "slide", "--max-new-tokens", 300, "--json", "--prompt")
    for prompt in ("a" * 20, "a" * 400):
        recited = load.load_engine(build, "fp32")
        recited.text = [*byte_tokenizer().encode("a" * 900).ids]
        content = json.loads(shardmill(*slide, prompt).stdout)
        assert (len(content["tokens"]), content["finish_reason"]) == (300, "length")
    (build / "model.json").write_text(json.dumps(manifest(context=8)))
    assert "a context of 8 tokens is too small to slide" in failure(*slide, "a")


def test_lossy_acceptance_says_so(build: Path) -> None:
    """Everywhere that the text goes; without it nothing does."""
    arguments = ("generate", build, "--prompt", PROMPT)
    lossy = (*arguments, "--accept-top-p", 0.9)
    assert "[LOSSY: drafts within 0.9 of the probability accepted; " in shardmill(*lossy).stderr
    assert json.loads(shardmill(*lossy, "--json").stdout)["lossy"] is True
    assert "LOSSY" not in shardmill(*arguments).stderr
    assert json.loads(shardmill(*arguments, "--json").stdout)["lossy"] is False
    assert "accept_top_p is 0.0: it must be in (0, 1]" in failure(*arguments, "--accept-top-p", 0)


def test_the_help_names_every_drafter_and_policy() -> None:
    """What can be asked for is what --help says."""
    from shardmill.decode import DRAFTERS, POLICIES

    assert set(re.findall(r"\w+", drafting.DRAFTERS)) - {"or"} == set(DRAFTERS)
    assert set(re.findall(r"\w+", drafting.POLICIES)) - {"or"} == set(POLICIES)


def test_temperature_draws_by_seed(build: Path) -> None:
    """At a temperature at which every byte is as likely, the seed decides; without one, nothing does."""

    def drawn(*options: object) -> list[int]:
        arguments = ("generate", build, "--prompt", PROMPT, "--max-new-tokens", 8, "--json", *options)
        tokens: list[int] = json.loads(shardmill(*arguments).stdout)["tokens"]
        return tokens

    hot = ("--temperature", 1e6)
    assert drawn(*hot, "--seed", 1) == drawn(*hot, "--seed", 1)
    assert drawn(*hot, "--seed", 1) != drawn(*hot, "--seed", 2)
    assert drawn("--seed", 1) == drawn("--seed", 2)


def test_prompts_from_files(build: Path, tmp_path: Path) -> None:
    """--prompt-file reads a file, and - is stdin."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert shardmill("generate", build, "--prompt-file", file).stdout == CONTINUATION + "\n"
    assert shardmill("generate", build, "--prompt-file", "-", stdin=PROMPT).stdout == CONTINUATION + "\n"


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
    assert "holds no text" in failure("audit-range", build, "--prompts", empty)
    assert "build the model first" in failure("generate", tmp_path / "none", "--prompt", "a")
    assert "no drafter is called 'foo'" in failure("generate", build, "--prompt", "a", "--drafter", "foo")
    assert "the prompt is empty" in failure("generate", build, "--prompt", "")
    too_long = failure("generate", build, "--prompt", "a" * 300)
    assert "the context 256" in too_long and "context_policy" not in too_long
    assert "finite" in failure("generate", build, "--prompt", "a", "--temperature", "inf")
    assert "No such file" in failure("audit-range", build, "--prompts", tmp_path / "none.txt")
    assert "No such file" in failure("synth-checkpoint", tmp_path / "new", "--like", tmp_path / "none.yaml")
    assert "No such file" in failure("generate", build, "--prompt-file", tmp_path / "none.txt")
    assert "not UTF-8" in failure("generate", build, "--prompt-file", binary)
    assert "no such file or folder" in failure("inspect", tmp_path / "none.mlpackage")


def test_what_is_wrong_is_said_before_a_model_is_loaded(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes minutes on a device, and nothing of it is needed to know."""
    monkeypatch.setattr(load, "load_engine", raising(AssertionError("loaded")))
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
    monkeypatch.setattr(load, "load_engine", raising(KeyError("some\nthing")))
    line = failure("generate", build, "--prompt", "a")
    assert line.startswith("KeyError: ")
    assert line.endswith(cli.HINT)
    closed = PermissionError(errno.EACCES, "Permission denied", "build/x")
    monkeypatch.setattr(load, "load_engine", raising(closed))
    assert failure("generate", build, "--prompt", "a") == "build/x: Permission denied"
    monkeypatch.setattr(load, "load_engine", raising(ShardmillError("gone;\n try again")))
    assert failure("generate", build, "--prompt", "a") == "gone; try again"


def test_a_traceback_on_demand(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--traceback lets every error through as it is."""
    error = ShardmillError("gone")
    monkeypatch.setattr(load, "load_engine", raising(error))
    assert shardmill("--traceback", "generate", build, "--prompt", "a").exception is error


def test_ctrl_c_is_quiet(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with 130, as shells expect, and one line."""
    monkeypatch.setattr(load, "load_engine", raising(KeyboardInterrupt()))
    result = shardmill("generate", build, "--prompt", "a")
    assert result.exit_code == 130
    assert result.output == "shardmill: interrupted\n"


def test_an_error_that_an_interrupt_made_is_no_error(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library swallows Ctrl-C while it is imported, and is half there afterwards."""
    monkeypatch.setattr(cli.interrupt, "happened", lambda: True)
    monkeypatch.setattr(load, "load_engine", raising(RuntimeError("Only a single TORCH_LIBRARY")))
    result = shardmill("generate", build, "--prompt", "a")
    assert (result.exit_code, result.output) == (130, "shardmill: interrupted\n")


def test_a_closed_pipe_is_no_error(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shardmill ... | head` ends without a message."""
    monkeypatch.setattr(load, "load_engine", raising(BrokenPipeError(32, "Broken pipe")))
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
