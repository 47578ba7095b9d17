"""`shardmill label`: what a built encoder finds in a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmill.commands.build import Build
from shardmill.commands.drafting import Precision
from shardmill.commands.prompt import checked_text, read_stdin, read_text
from shardmill.errors import ShardmillError

if TYPE_CHECKING:
    from shardmill.runtime.label import Labelled, Reader


def label(
    build: Build,
    text: Annotated[str | None, typer.Option(help="Text to label.")] = None,
    file: Annotated[str | None, typer.Option(help="File with the text; - is stdin.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Treat each line as a text of its own.")] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Print the text with each span replaced by its type.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each text.")] = False,
    precision: Precision = "fp32",
) -> None:
    """Find spans in a text: their positions in characters, types and scores. Or print the labels of a whole text."""
    from shardmill.quiet import quiet_coremltools
    from shardmill.runtime import label as reading

    if (text is None) == (file is None):
        raise typer.BadParameter("give the text with either --text or --file")
    if file is None:
        content = checked_text(str(text), "the text")
    else:
        content = read_stdin() if file == "-" else read_text(Path(file))
    with quiet_coremltools():
        reader = reading.load(build, precision)
    if redact and reader.classifies:
        raise ShardmillError(f"{build}: labels whole texts and finds no spans in them; leave out --redact")
    texts = content.splitlines() if lines else [content]
    before = [f"{number}\t" if lines else "" for number, _ in enumerate(texts, 1)]
    if reader.classifies:
        for line, classified in zip(before, reading.classify(reader, texts), strict=True):
            _show_labels(classified.labels, line, as_json)
        return
    for line, one, found in zip(before, texts, reading.label_all(reader, texts), strict=True):
        _show_spans(reader, one, found, line, redact, as_json)


def _show_labels(shares: dict[str, float], line: str, as_json: bool) -> None:
    """Prints the labels of a whole text, each after `line`."""
    from shardmill.runtime.load import engine_name

    if as_json:
        typer.echo(json.dumps({"labels": shares, "engine": engine_name()}))
        return
    for name, share in shares.items():
        typer.echo(f"{line}{share:.4f}\t{name}")


def _show_spans(reader: Reader, text: str, found: Labelled, line: str, redact: bool, as_json: bool) -> None:
    """Prints spans, each after `line`; or the text without them."""
    from shardmill.runtime.label import as_object, redacted
    from shardmill.runtime.load import engine_name

    if as_json:
        content = as_object(text, found) | {"engine": engine_name()}
        typer.echo(json.dumps(content | ({"redacted": redacted(text, found.spans)} if redact else {})))
        return
    if redact:
        typer.echo(redacted(text, found.spans), nl=not text.endswith("\n"))
    else:
        for span in found.spans:
            place = f"{line}{span.start}\t{span.end}\t{span.type}\t{span.score:.4f}"
            typer.echo(f"{place}\t{text[span.start : span.end]!r}")
    if not found.exact:
        typer.echo(
            f"{found.tokens} tokens in {found.windows} windows of {reader.encoder.longest}: approximate, for a token "
            "may depend on more of the text than a window holds",
            err=True,
        )
