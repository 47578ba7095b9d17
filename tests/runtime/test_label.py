"""Spans of texts are transformers' own, character by character; windows over long texts are exact where they say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoders
import limits
import pytest
import tiny
import torch
from models import tiny_encoders
from typer.testing import CliRunner

from shardmill import cli, machine
from shardmill.machine import is_portable
from shardmill.runtime import label as reading
from shardmill.runtime.label import Labelled, Reader, redacted
from shardmill.runtime.spans import Span

pytestmark = pytest.mark.slow

NAMES = ["Anna Kovalenko", "Jürgen Müller", "João Tavares", "王小明", "Ирина Соколова", "田中 春人", "Seán Ó Briain"]
PLACES = ["14 Harbour Street, Bristol", "Ringstraße 8, 50667 Köln", "27, rue des Lilas", "北京市海淀区", "via Roma 3"]
CONTACTS = ["anna.k@example.org", "+44 20 7946 0958", "010-5555-0199", "https://example.com/?q=1", "4929-1180-2217"]
EDGES = [
    "",
    "x",
    " ",
    "\n",
    "🎉",
    "\U0001f469\u200d\U0001f467",
    "e\u0301",
    "é",
    "\u200b",
    "a\tb",
    "  two  ",
    "0",
    "[CLS]",
    "ﬁ",
    "İ",
]
LONG = 20_000  # characters
SCORES = limits.logprobs(limits.model(3, 96), 2, len(tiny_encoders.LABELS))  # three layers
in_fp32 = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")


def table() -> list[str]:
    """200 texts."""
    texts = [f"{name} lives at {place}." for name in NAMES for place in PLACES]
    texts += [f"Write to {name}: {contact}!" for name in NAMES for contact in CONTACTS]
    texts += [f"{place} / {contact} 🎉" for place in PLACES for contact in CONTACTS]
    texts += [f"{number}" for number in (7, -3.5, 10**12, "1,000.00", "3/4", "0x1F")]
    texts += [name.upper() + name for name in NAMES] + EDGES + [f"  {name}\n\n{name}\t" for name in NAMES]
    texts += [
        f"Page {page}: {NAMES[page % len(NAMES)]} paid {page * 37}.{page:02} €." for page in range(200 - len(texts))
    ]
    assert len(texts) == 200 and len(set(texts)) == 200
    return texts


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of each encoder with a bucket that takes every text of the table."""
    folder = tmp_path_factory.mktemp(request.param)
    return encoders.build(tiny_encoders.write_tiny(request.param, folder / "ck"), folder / "build", buckets=[32, 128])


@pytest.fixture(scope="module")
def banded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of an encoder whose tokens see four others on either side, so that windows can be exact."""
    folder = tmp_path_factory.mktemp("banded")
    types = ["sliding_attention"] * 3
    checkpoint = tiny_encoders.write_tiny("modernbert", folder / "ck", layer_types=types, max_position_embeddings=32768)
    return encoders.build(checkpoint, folder / "build", buckets=[64])


def pipeline(build: Path, attention: str = "eager") -> Any:
    """transformers' own pipeline on the checkpoint, in fp32."""
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": attention}
    model = transformers.AutoModelForTokenClassification.from_pretrained(build / "source", **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(build / "source")
    return transformers.pipeline(
        "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple"
    )


def theirs(found: list[dict[str, Any]]) -> list[tuple[int, int, str, float]]:
    """What the pipeline found, as ours is compared."""
    return [(row["start"], row["end"], row["entity_group"], float(row["score"])) for row in found]


def ours(found: Labelled) -> list[tuple[int, int, str, float]]:
    """Spans as they are compared."""
    return [(span.start, span.end, span.type, span.score) for span in found.spans]


def spans_agree(what: str, found: list[Any], expected: list[Any], limit: limits.Limit) -> None:
    """Fail if spans differ in places or types, or in scores by more than rounding."""
    __tracebackhide__ = True
    assert [one[:3] for one in found] == [one[:3] for one in expected], what
    if found:
        limits.numbers_agree(what, [one[3] for one in found], [one[3] for one in expected], limit, size=1)


@in_fp32
def test_spans_are_those_of_transformers_pipeline(built: Path) -> None:
    """On 200 texts: places in characters, types and scores."""
    reader, judge, spans = reading.load_reader(built, "fp32"), pipeline(built), 0
    for text in table():
        found = reading.label(reader, text)
        assert found.exact and found.windows == bool(text), text
        spans_agree(f"the scores of {text!r}", ours(found), theirs(judge(text)), SCORES)
        spans += len(found.spans)
    assert spans > 1000


@in_fp32
def test_texts_that_share_passes_are_labelled_as_if_each_had_its_own(built: Path) -> None:
    reader, texts = reading.load_reader(built, "fp32"), table()[:60]
    passes: list[None] = []
    found = reading.label_all(replace(reader, before_pass=lambda: passes.append(None)), texts)
    for together, text in zip(found, texts, strict=True):
        alone = reading.label(reader, text)
        spans_agree(f"the scores of {text!r}", ours(together), ours(alone), SCORES)
        assert together.tokens == alone.tokens
    assert len(passes) < len(texts) / 2


@in_fp32
def test_windows_over_a_long_text_are_exact(banded: Path) -> None:
    """20,000 characters through windows of 64 tokens are what the whole text in one pass gives."""
    text = (" ".join(table())[:2000] + tiny.sample_text() * 3)[:LONG]
    assert len(text) == LONG
    found = reading.label(reading.load_reader(banded, "fp32"), text)
    assert found.exact and found.windows > 50
    judged = theirs(pipeline(banded, "sdpa")(text))  # eager attention would take gigabytes
    spans_agree("the scores", ours(found), judged, SCORES)


def test_windows_that_can_not_be_exact_say_so(built: Path) -> None:
    found = reading.label(reading.load_reader(built, "fp32"), " ".join(table())[:3000])
    assert not found.exact and found.windows > 5
    assert found.spans and list(found.spans) == sorted(found.spans, key=lambda span: span.start)


def test_a_calibration_leads_spans_through_bioes(built: Path) -> None:
    """Every span begins and ends as the scheme asks, and a heavy bias for the background leaves none."""
    reader, text = reading.load_reader(built, "fp32"), "Write to Anna Kovalenko: anna.k@example.org!"
    biases = dict.fromkeys(["background_stay", "background_to_start", "end_to_background", "end_to_start"], 0.0)
    biases |= {"inside_to_continue": 0.0, "inside_to_end": 0.0}
    assert ours(reading.label(Reader(reader.encoder, reader.tokenizer, biases), text))
    quiet = Reader(reader.encoder, reader.tokenizer, biases | {"background_stay": 100.0})
    assert reading.label(quiet, text).spans == ()


def test_redaction_puts_types_in_the_place_of_spans() -> None:
    spans = [Span(0, 4, "person", 1.0), Span(8, 9, "email", 1.0)]
    assert redacted("Anna at @ home", spans) == "[person] at [email] home"


def test_the_command_prints_what_was_found(built: Path) -> None:
    text = "Anna Kovalenko lives at 14 Harbour Street."
    run = CliRunner().invoke
    said = run(cli.app, ["label", str(built), "--text", text, "--json", "--redact"])
    assert said.exit_code == 0, said.output
    content = json.loads(said.stdout)
    assert all(text[span["start"] : span["end"]] == span["text"] for span in content["spans"])
    assert content["exact"] and content["redacted"] == run(
        cli.app, ["label", str(built), "--text", text, "--redact"]
    ).stdout.removesuffix("\n")
    lines = run(cli.app, ["label", str(built), "--text", text]).stdout.splitlines()
    assert len(lines) == len(content["spans"]) > 0


def test_the_command_takes_each_line_for_a_text(built: Path, tmp_path: Path) -> None:
    texts = ["Anna Kovalenko", "", "14 Harbour Street, Bristol"]
    (tmp_path / "texts").write_text("\n".join(texts))
    run, asked = CliRunner().invoke, ["label", str(built), "--file", str(tmp_path / "texts"), "--lines"]
    objects = [json.loads(line) for line in run(cli.app, [*asked, "--json"]).stdout.splitlines()]
    alone = [json.loads(run(cli.app, ["label", str(built), "--text", text, "--json"]).stdout) for text in texts]
    assert [[s["text"] for s in one["spans"]] for one in objects] == [
        [s["text"] for s in one["spans"]] for one in alone
    ]
    numbers = [line.split("\t")[0] for line in run(cli.app, asked).stdout.splitlines()]
    assert set(numbers) == {"1", "3"}
    assert len(run(cli.app, [*asked, "--redact"]).stdout.splitlines()) == len(texts)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of an encoder that labels whole texts."""
    folder = tmp_path_factory.mktemp("classifier")
    checkpoint = tiny_encoders.write_tiny("bert", folder / "ck", "text-classification")
    return encoders.build(checkpoint, folder / "build", buckets=[32])


def test_the_command_says_what_whole_texts_are(classifier: Path, tmp_path: Path) -> None:
    texts = ["Anna Kovalenko", "14 Harbour Street, Bristol"]
    (tmp_path / "texts").write_text("\n".join(texts))
    run, asked = CliRunner().invoke, ["label", str(classifier), "--file", str(tmp_path / "texts"), "--lines"]
    objects = [json.loads(line) for line in run(cli.app, [*asked, "--json"]).stdout.splitlines()]
    expected = reading.classify(reading.load_reader(classifier, "fp32"), texts)
    for found, one in zip(objects, expected, strict=True):
        assert found["engine"] == machine.engine()["name"] and [*found["labels"]] == [*one.labels]
        limits.numbers_agree("labels", [*found["labels"].values()], [*one.labels.values()], SCORES, size=1)
    rows = [line.split("\t") for line in run(cli.app, asked).stdout.splitlines()]
    assert [(number, name) for number, _, name in rows] == [
        (str(number), name) for number, one in enumerate(expected, 1) for name in one.labels
    ]
    alone = run(cli.app, ["label", str(classifier), "--text", texts[0]]).stdout.splitlines()
    assert [line.split("\t")[1] for line in alone] == [*expected[0].labels]


def test_a_text_without_spans_is_not_redacted(classifier: Path) -> None:
    said = CliRunner().invoke(cli.app, ["label", str(classifier), "--text", "Anna", "--redact"])
    assert (said.exit_code, said.stdout) == (1, "")
    assert (
        said.stderr == f"shardmill: {classifier}: labels whole texts and finds no spans in them; leave out --redact\n"
    )


def test_a_decoders_command_names_the_right_one(built: Path) -> None:
    said = CliRunner().invoke(cli.app, ["generate", str(built), "--prompt", "x"])
    assert said.exit_code == 1 and "holds an encoder" in said.stderr and "shardmill label" in said.stderr
