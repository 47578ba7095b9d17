"""`shardmill generate`: text from a built model, streamed as it comes, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardmill.errors import ShardmillError
from shardmill.runtime.manifest import read_manifest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardmill.decode import Drafter, GenerationResult, PrefillEvent, TokenEvent
    from shardmill.runtime.engine import Engine

ENDINGS = {
    "eos": "the model ended the text",
    "length": "--max-new-tokens reached",
    "context": "the context is full: build with a larger one for more",
    "stop": "a stop string came",
}
DRAFTERS = "none, ngram, suffix, learned or draft_model"
POLICIES = "cost_model or always"
EFFECT = "Changes the speed only; but draft_model at a temperature also what a seed gives."
Precision = Annotated[
    Literal["fp32", "fp16"],
    typer.Option(help="The portable engine's. fp16 rounds as the Neural Engine does, and wide passes may then round "
                 "a near tie otherwise than single ones; Core ML has no choice."),
]  # fmt: skip


def generate(
    build: Annotated[Path, typer.Argument(help="Folder of a built model, e.g. build/demo.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the text to continue; - is stdin.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    drafter: Annotated[str, typer.Option(help=f"What drafts tokens: {DRAFTERS}. {EFFECT}")] = "ngram",
    draft_build: Annotated[Path | None, typer.Option(help="For draft_model: the draft model's build folder.")] = None,
    policy: Annotated[str, typer.Option(help=f"How much is drafted: {POLICIES}.")] = "cost_model",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    precision: Precision = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
) -> None:
    """Continue a text with a built model."""
    from shardmill.decode import Options, Sampling, Session, create_policy, text_after
    from shardmill.decode import generate as decode

    check_drafter(drafter, draft_build)
    check_policy(policy)
    text = read_prompt(prompt, prompt_file)
    manifest = read_manifest(build)
    tokenizer = load_tokenizer(build, manifest)
    tokens: list[int] = tokenizer.encode(text).ids
    sampling = Sampling(temperature=temperature, seed=seed)
    session = Session(load_engine(build, precision))
    events = decode(
        drafter=make_drafter(drafter, draft_build, manifest.get("vocab"), precision),
        policy=create_policy(policy, session.widths),
        session=session,
        prompt=tokens,
        max_new_tokens=max_new_tokens,
        eos=manifest["eos_token_ids"],
        options=Options(sampling=sampling, detokenize=text_after(tokenizer.decode, tokens)),
    )
    if sys.stdout.isatty() and not as_json:  # a person reads on from the prompt; a pipe gets the new text only
        typer.secho(text, dim=True, nl=False)
    result = consume(events, None if as_json else sys.stdout)
    if as_json:
        typer.echo(json.dumps({**summary(result), "drafter": drafter, "engine": engine_name()}))
    else:
        typer.echo()
        typer.echo(closing_line(result, engine_name()), err=True)


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text to continue. Raises BadParameter for none or two, ShardmillError for a file that can't be read."""
    if prompt is not None and prompt_file is None:
        return prompt
    if prompt is not None or prompt_file is None:
        raise typer.BadParameter("give the text to continue with either --prompt or --prompt-file")
    return sys.stdin.read() if prompt_file == "-" else read_text(Path(prompt_file))


def read_text(file: Path) -> str:
    """A file's text. Raises ShardmillError for one that can't be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ShardmillError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ShardmillError(f"{file}: not UTF-8 text") from error


def check_drafter(name: str, draft_build: Path | None) -> None:
    """Raises the error of a wrong --drafter before a model is loaded."""
    from shardmill.decode import DRAFTERS as KNOWN

    if name == "draft_model":
        if draft_build is None:
            raise ShardmillError("drafter draft_model needs a draft model: name a second build with --draft-build")
    elif name not in KNOWN:
        raise ShardmillError(f"no drafter is called {name!r}: use one of {', '.join(KNOWN)}")


def check_policy(name: str) -> None:
    """Raises the error of a wrong --policy before a model is loaded."""
    from shardmill.decode import POLICIES as KNOWN

    if name not in KNOWN:
        raise ShardmillError(f"no draft policy is called {name!r}: use one of {', '.join(KNOWN)}")


def load_tokenizer(build: Path, manifest: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the manifest names."""
    from tokenizers import Tokenizer

    file = build / manifest["tokenizer"]["path"]
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ShardmillError(f"{file} can't be read as a tokenizer: {error}") from error


def load_engine(build: Path, precision: str) -> Engine:
    """The built model; a spinner on a terminal meanwhile."""
    from rich.console import Console

    from shardmill.quiet import quiet_coremltools
    from shardmill.runtime import engine
    from shardmill.runtime.threads import choose_threads

    spinner = Console(stderr=True).status(f"loading {build}")
    with spinner, quiet_coremltools():
        loaded = engine.load(build, precision)
        choose_threads(loaded)
    return loaded


def engine_name() -> str:
    """What runs the programs here: coreml or portable."""
    from shardmill import machine

    return machine.engine()["name"]


def make_drafter(name: str, draft_build: Path | None, vocab: int | None, precision: str) -> Drafter:
    """The drafter of that name; a draft model is loaded as the target is."""
    from shardmill.decode import Session, create_drafter

    if draft_build is None:
        return create_drafter(name)
    if name != "draft_model":
        raise typer.BadParameter("--draft-build goes with --drafter draft_model")
    return create_drafter(name, draft_session=Session(load_engine(draft_build, precision)), vocab=vocab)


def consume(events: Iterable[PrefillEvent | TokenEvent | GenerationResult], out: Any) -> GenerationResult:
    """Writes text to `out`, if there is one, as soon as it is final; returns the result."""
    from shardmill.decode import GenerationResult, PrefillEvent

    for event in events:
        if isinstance(event, PrefillEvent):
            continue
        piece = event.tail if isinstance(event, GenerationResult) else event.text
        if out is not None and piece:
            out.write(piece)
            out.flush()
        if isinstance(event, GenerationResult):
            return event
    raise AssertionError("the decoding loop ended without a result")


def summary(result: GenerationResult) -> dict[str, Any]:
    """The result as JSON has it; speeds are null where nothing was measured."""
    return {
        "tokens": list(result.tokens),
        "text": result.text,
        "passes": result.passes,
        "accepted": list(result.accepted),
        "drafted": list(result.drafted),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "prefill_tok_s": rate(result.prompt_tokens - result.reused_tokens, result.prefill_seconds),
        "decode_tok_s": rate(len(result.tokens) - 1, result.decode_seconds),  # the first token comes with the prefill
    }


def rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second."""
    return round(tokens / seconds, 2) if tokens > 0 and seconds > 0 else None


def closing_line(result: GenerationResult, engine: str) -> str:
    """What it took, for a person."""
    figures = summary(result)
    speeds = ", ".join(
        f"{name} {figures[key]:.1f} tok/s"
        for name, key in (("prefill", "prefill_tok_s"), ("decode", "decode_tok_s"))
        if figures[key] is not None
    )
    drafts = f"{sum(result.accepted)} of {sum(result.drafted)} drafted tokens accepted"
    ended = ENDINGS[result.finish_reason]
    return f"[{len(result.tokens)} tokens in {result.passes} passes, {drafts}; {speeds}; {engine} engine; {ended}]"
