"""`shardmill generate`: text from a built model, streamed token by token, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from shardmill import machine
from shardmill.checkpoint.tokenizer import encode_beginning, read_tokenizer
from shardmill.commands.arguments import (
    AdapterName,
    Build,
    ContextOption,
    DraftBuild,
    DrafterName,
    Lossy,
    PolicyName,
    Precision,
    Ungated,
    check_drafter,
    check_policy,
    checked_text,
    make_drafter,
    opened,
    read_checked,
)
from shardmill.commands.check import NoCheck, check_once
from shardmill.errors import ShardmillError
from shardmill.files import read_named
from shardmill.runtime.manifest import UNGATED

if TYPE_CHECKING:
    from drafted_decoding import GenerationResult, PrefillEvent, TokenEvent
    from tokenizers import Tokenizer

    from shardmill.media.prompt import Seen
    from shardmill.runtime.label import Labelled, Reader


def _read_text(text: str | None, file: str | None, what: str, refusal: str) -> str:
    """Return the text to work on.

    Args:
        text: the text itself.
        file: a file's name; "-" is standard input.
        what: the text's name in errors.
        refusal: the error if text and file are given, or neither is.

    Raises:
        typer.BadParameter: text and file are given, or neither is.
        ShardmillError: the text cannot be read or is not UTF-8.
    """
    if (text is None) == (file is None):
        raise typer.BadParameter(refusal)
    if text is not None:
        return checked_text(text, what)
    return _read_stdin() if file == "-" else read_named(Path(str(file)))


def _read_stdin() -> str:
    """Read standard input. Raises ShardmillError if it is not UTF-8."""
    try:
        return checked_text(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as error:
        raise ShardmillError("standard input is not UTF-8 text") from error


def _with_media(
    build: Path,
    manifest: Mapping[str, Any],
    tokenizer: Tokenizer,
    text: str,
    files: Sequence[Path],
    policy: str,
    kind: str,
) -> tuple[str, Sequence[int], list[Seen]]:
    """Return a prompt with images or sounds, its tokens, and these as the model takes them.

    They and the text are one message of a user in the build's chat template. Without a template, they stand before the
    text. `kind` is image or audio, as the option is called.

    Raises:
        ShardmillError: the build takes none, or one can't be used.
    """
    from shardmill.serve.pictures import picture_reader, take_file
    from shardmill.serve.sounds import sound_reader
    from shardmill.templates.render import load_template

    reader: Any = picture_reader(manifest, tokenizer) if kind == "image" else sound_reader(manifest, tokenizer)
    many = "images" if kind == "image" else kind
    if reader is None:
        raise ShardmillError(f"{build}: takes no {many}: leave out --{kind}, or build with `{many}` in the config")
    if policy == "slide":
        raise ShardmillError(f"--{kind}: a context that slides can't hold {many}; leave out --context-policy slide")
    if len(files) > reader.most:
        raise ShardmillError(f"--{kind}: there are {len(files)}, at most {reader.most} are allowed: give fewer")
    pictures = [take_file(reader.see, file) for file in files]
    prompt, template = reader.prompt(pictures), load_template((build / manifest["tokenizer"]["path"]).parent)
    hidden = prompt.hide(text)
    if template is None:
        written = reader.rules.text.mark * len(pictures) + hidden
    else:
        parts = [*({"type": kind} for _ in pictures), {"type": "text", "text": hidden}]
        written = template([{"role": "user", "content": parts}])
    return text, prompt.tokens(written), pictures


_ENDINGS = {
    "eos": "the model ended the text",
    "length": "--max-new-tokens reached",
    "context": "the context is full: build with a larger one for more",
    "stop": "a stop string came",
}


def consume(events: Iterable[PrefillEvent | TokenEvent | GenerationResult], out: TextIO | None) -> GenerationResult:
    """Write text to `out`, if given, as soon as the text is final; return the result."""
    from drafted_decoding import GenerationResult, PrefillEvent

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


def _result_json(result: GenerationResult) -> dict[str, Any]:
    """Return the result as --json prints it; a speed is null if nothing was measured."""
    return {
        "tokens": list(result.tokens),
        "text": result.text,
        "passes": result.passes,
        "accepted": list(result.accepted),
        "drafted": list(result.drafted),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "prefill_tok_s": _rate(result.prompt_tokens - result.reused_tokens, result.prefill_seconds),
        "decode_tok_s": _rate(len(result.tokens) - 1, result.decode_seconds),  # the prefill gives the first token
    }


def marked(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key with which JSON says that the gates of a build have not all passed; empty if they have."""
    return {UNGATED: manifest[UNGATED]} if UNGATED in manifest else {}


def closing_line(
    result: GenerationResult,
    engine: str,
    accept_top_p: float | None = None,
    manifest: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the cost of a generation in one line, which begins with a warning if the text is not exact or ungated."""
    figures = _result_json(result)
    speeds = ", ".join(
        f"{name} {figures[key]:.1f} tok/s"
        for name, key in (("prefill", "prefill_tok_s"), ("decode", "decode_tok_s"))
        if figures[key] is not None
    )
    drafts = f"{sum(result.accepted)} of {sum(result.drafted)} drafted tokens accepted"
    ended = _ENDINGS[result.finish_reason]
    lossy = "" if accept_top_p is None else f"LOSSY: drafts within {accept_top_p:g} of the probability accepted; "
    ungated = "UNGATED; " if UNGATED in manifest else ""
    made = f"{len(result.tokens)} tokens in {result.passes} passes"
    return f"[{ungated}{lossy}{made}, {drafts}; {speeds}; {engine} engine; {ended}]"


def _rate(tokens: int, seconds: float) -> float | None:
    """Return tokens per second; None if tokens or seconds are 0."""
    return round(tokens / seconds, 2) if tokens > 0 and seconds > 0 else None


def generate(
    context: typer.Context,
    build: Build,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the text to continue; - is stdin.")] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--image", help="PNG, JPEG, WebP or GIF file to answer about; may be given several times."),
    ] = None,
    sounds: Annotated[
        list[Path] | None,
        typer.Option("--audio", help="WAV, FLAC, Ogg or MP3 file to answer about; may be given several times."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Most tokens to generate.")
    ] = 128,
    drafter: DrafterName = "ngram",
    draft_build: DraftBuild = None,
    policy: PolicyName = "cost_model",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    context_policy: ContextOption = "stop",
    adapter: AdapterName = None,
    accept_top_p: Lossy = None,
    precision: Precision = "fp32",
    no_check: NoCheck = False,
    ungated: Ungated = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
) -> None:
    """Continue a text with a built model."""
    from drafted_decoding import Options, Sampling, Session, check_prompt, create_policy
    from drafted_decoding import generate as decode
    from drafted_decoding.drafters import TRAINED

    from shardmill.runtime import process

    check_drafter(drafter, draft_build)
    check_policy(policy)
    refusal = "give the text to continue with either --prompt or --prompt-file"
    text = _read_text(prompt, prompt_file, "the prompt", refusal)
    sampling = Sampling(temperature=temperature, seed=seed, accept_top_p=accept_top_p)
    build = opened(build, ungated, context)
    manifest = read_checked(build, drafter, draft_build, context_policy, adapter)
    tokenizer = read_tokenizer(build / manifest["tokenizer"]["path"])
    if images and sounds:
        raise ShardmillError("--audio: no build takes images as well; leave out one of the two")
    if files := images or sounds:
        kind = "image" if images else "audio"
        text, tokens, pictures = _with_media(build, manifest, tokenizer, text, files, context_policy, kind)
    else:
        tokens, pictures = encode_beginning(tokenizer, text), []
    room = None if context_policy == "slide" else manifest["context"]
    check_prompt(tokens, vocab=manifest["vocab"], room=room, beyond=bool(pictures))
    engine = process.load_engine(build, precision)
    check_once(build, engine, precision, no_check)
    for row in {row.numbers: row for picture in pictures for row in picture.shown}.values():
        engine.show(row.numbers, row.view.columns, row.view.grid)
    head = engine.load_drafter() if drafter in TRAINED else None
    session = Session(engine, context_policy=context_policy)
    session.use_adapter(adapter)
    events = decode(
        drafter=make_drafter(drafter, draft_build, engine.vocab, precision, context_policy, head),
        policy=create_policy(policy, session.widths),
        session=session,
        prompt=tokens,
        max_new_tokens=max_new_tokens,
        eos=manifest["eos_token_ids"],
        options=Options(sampling=sampling, detokenize=tokenizer.decode),
    )
    if sys.stdout.isatty() and not as_json:  # a person reads the prompt first; a pipe gets only the new text
        typer.secho(text, dim=True, nl=False)
    result = consume(events, None if as_json else sys.stdout)
    if as_json:
        more = {"drafter": drafter, "engine": machine.engine_name(precision), "lossy": accept_top_p is not None}
        more |= {pictures[0].kind[1]: [picture.facts() for picture in pictures]} if pictures else {}
        typer.echo(json.dumps({**_result_json(result), **more, **marked(manifest)}))
    else:
        typer.echo()
        typer.echo(closing_line(result, machine.engine_name(precision), accept_top_p, manifest), err=True)


def label(
    context: typer.Context,
    build: Build,
    text: Annotated[str | None, typer.Option(help="Text to label.")] = None,
    file: Annotated[str | None, typer.Option(help="File with the text; - is stdin.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Treat each line as a separate text.")] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Print the text with each span replaced by its type.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each text.")] = False,
    precision: Precision = "fp32",
    no_check: NoCheck = False,
    ungated: Ungated = False,
) -> None:
    """Find spans in a text: their positions in characters, types and scores. Or print the labels of a whole text."""
    from shardmill.imports import quiet_coremltools
    from shardmill.runtime import label as reading

    content = _read_text(text, file, "the text", "give the text with either --text or --file")
    build = opened(build, ungated, context)
    with quiet_coremltools():
        reader = reading.load_reader(build, precision)
    check_once(build, reader.encoder, precision, no_check)
    if redact and reader.classifies:
        raise ShardmillError(f"{build}: labels whole texts and finds no spans in them; leave out --redact")
    texts = content.splitlines() if lines else [content]
    before = [f"{number}\t" if lines else "" for number, _ in enumerate(texts, 1)]
    if reader.classifies:
        for line, classified in zip(before, reading.classify(reader, texts), strict=True):
            _show_labels(reader, classified.labels, line, as_json)
        return
    for line, one, labelled in zip(before, texts, reading.label_all(reader, texts), strict=True):
        _show_spans(reader, one, labelled, line, redact, as_json)


def _show_labels(reader: Reader, shares: dict[str, float], line: str, as_json: bool) -> None:
    """Print the labels of a whole text, each after `line`."""
    if as_json:
        more = {"engine": machine.engine_name(), **marked(reader.encoder.manifest)}
        typer.echo(json.dumps({"labels": shares, **more}))
        return
    for name, share in shares.items():
        typer.echo(f"{line}{share:.4f}\t{name}")


def _show_spans(reader: Reader, text: str, labelled: Labelled, line: str, redact: bool, as_json: bool) -> None:
    """Print spans, each after `line`, or the text without the spans."""
    from shardmill.runtime.label import as_object, redacted

    if as_json:
        content = as_object(text, labelled) | {"engine": machine.engine_name()} | marked(reader.encoder.manifest)
        typer.echo(json.dumps(content | ({"redacted": redacted(text, labelled.spans)} if redact else {})))
        return
    if redact:
        typer.echo(redacted(text, labelled.spans), nl=not text.endswith("\n"))
    else:
        for span in labelled.spans:
            place = f"{line}{span.start}\t{span.end}\t{span.type}\t{span.score:.4f}"
            typer.echo(f"{place}\t{text[span.start : span.end]!r}")
    if not labelled.exact:
        typer.echo(
            f"{labelled.tokens} tokens in {labelled.windows} windows of {reader.encoder.longest}: approximate, for a "
            "token may depend on more of the text than a window holds",
            err=True,
        )
