"""Many drawn cases, each compared with what the Python side says; differences are named by their cause and counted.

Every run draws a few of each. SHARDMILL_SWIFT_COUNTS=whole draws as many as the package was once judged by: some
170,000 texts, 35,000 streams, as many stop strings, 1,080 sampled requests and 1,000 mutations. `pytest -s` shows the
counts. Conversations are counted in test_templates.py.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted_decoding.sampler import Sampler, Sampling
from drafted_decoding.text import TextStream
from processes import succeeded
from tokenizers import Tokenizer

from shardmill.serve.tool_reader import CallReader
from shardmill.serve.tools import find_format

from .programs import demand_check, script
from .test_texts import tiny_build

pytestmark = pytest.mark.slow
WHOLE = os.environ.get("SHARDMILL_SWIFT_COUNTS") == "whole"
FURTHER = [*filter(None, os.environ.get("SHARDMILL_TOKENIZERS", "").split(":"))]  # more tokenizer.json files
maker = script("made_tokenizers")
STREAMED = ("gpt2", "llama3", "qwen", "o200k", "llama2", "gemma")
BROKEN = "\ufffd"  # stands for bytes that are no character
LONG = 12  # texts of 200 kB among all
SPARSE = {  # expressions that leave most of a text out: DeepSeek V3's three one after the other, and plain ones
    "deepseek": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "digits": ["[0-9][0-9][0-9]"],
    "never": ["zebra"],
}


def many(whole: int, few: int) -> int:
    return whole if WHOLE else few


def drawn(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `shardmill-check draw` makes of a file."""
    files = [folder / "draws.json", folder / "drawn.json"]
    files[0].write_text(json.dumps(given))
    succeeded(subprocess.run([*demand_check(), "draw", *map(str, files)], capture_output=True, text=True, check=False))
    found: dict[str, Any] = json.loads(files[1].read_text())
    return found


def drawn_texts(count: int, seed: int = 11) -> list[str]:
    """Hard pieces, characters of every plane, assigned or not, and some long lines."""
    rng, texts = random.Random(seed), list(maker.nasty_texts(count, seed))
    for place in range(0, count, 4):
        points = (rng.randrange(rng.choice([0x3000, 0x10000, 0x20000, 0x110000])) for _ in range(rng.randrange(1, 20)))
        texts[place] += "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
    for place in range(LONG if WHOLE else 1):
        line = "".join(texts[place : place + 40]).replace("\n", " ")
        texts[count - 1 - place] = (line * (200_000 // len(line) + 1))[:200_000]
    return texts


def tokenizer_file(name: str, folder: Path) -> Path:
    if name in FURTHER:
        return Path(name)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(maker.made(name), ensure_ascii=False), encoding="utf-8")
    return file


def opened(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def swift_tokens(file: Path, texts: Sequence[str], folder: Path) -> tuple[list[list[int]], list[str]]:
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    command = [*demand_check(), "tokenize", str(file), str(folder / "texts.json"), str(folder / "result.json")]
    succeeded(subprocess.run(command, capture_output=True, text=True, check=False))
    found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found["ids"], found["texts"]


def unequal(file: Path, texts: Sequence[str], folder: Path) -> list[int]:
    """The places of texts whose tokens, or whose tokens' texts, differ from those of the package `tokenizers`."""
    tokenizer = opened(file)
    theirs = [tokenizer.encode(text).ids for text in texts]
    back = [tokenizer.decode(ids, skip_special_tokens=False) for ids in theirs]
    ours, shown = swift_tokens(file, texts, folder)
    pairs = zip(zip(ours, shown, strict=True), zip(theirs, back, strict=True), strict=True)
    return [place for place, (mine, other) in enumerate(pairs) if mine != other]


# What is known to differ, and whose it is: a text is put down to a cause if it is equal without the cause's characters.
CAUSES: dict[str, Callable[[str], bool]] = {
    "another version of Unicode": lambda character: unicodedata.category(character) == "Cn",
    "Foundation's NFKC on Linux leaves some jamo apart": lambda character: (
        "\u3131" <= character <= "\u318e" or "\uffa0" <= character <= "\uffdc"
    ),
}


@pytest.mark.parametrize("name", [*maker.KINDS, *FURTHER])
def test_texts(name: str, tmp_path: Path) -> None:
    demand_check()
    file = tokenizer_file(name, tmp_path)
    texts = drawn_texts(many(5924, 200))
    left = [texts[place] for place in unequal(file, texts, tmp_path)]
    counts: Counter[str] = Counter()
    for cause, is_its in CAUSES.items():
        reduced = ["".join(character for character in text if not is_its(character)) for text in left]
        other = set(unequal(file, reduced, tmp_path)) if left else set()
        other |= {place for place, text in enumerate(left) if text == reduced[place]}
        counts[cause] = len(left) - len(other)
        left = [left[place] for place in sorted(other)]
    print(
        f"\ntexts, {Path(name).parent.name or name}: {len(texts)} compared, {dict(counts)}, {len(left)} without a cause"
    )
    assert left == []


def prose(length: int, rng: random.Random) -> str:
    words = maker.SENTENCES.split()
    text = ""
    while len(text) < length:
        sentence = rng.choices(words, k=rng.randrange(3, 20))
        text += f"In {rng.randrange(1000, 2100)} {' '.join(sentence)}, «{rng.choice(words)}». "
    return text[:length]


@pytest.mark.parametrize("name", [*maker.KINDS, *SPARSE, "replaced"])
def test_prose_is_never_refused(name: str, tmp_path: Path) -> None:
    """Of 100 to 5,000 characters, also where an expression leaves most of it out."""
    demand_check()
    rng = random.Random(5)
    texts = [prose(rng.randrange(100, 5001), rng) for _ in range(many(300, 20))]
    file = tokenizer_file(name if name in maker.KINDS else "llama3", tmp_path)
    content = json.loads(file.read_text(encoding="utf-8"))
    if name in SPARSE:
        steps = [
            {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
            for one in SPARSE[name]
        ]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, maker.PLAIN]}
    if name == "replaced":
        content["normalizer"] = {"type": "Replace", "pattern": {"Regex": r"\d{4}"}, "content": "year"}
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    assert unequal(file, texts, tmp_path) == []
    print(f"\nprose, {name}: {len(texts)} compared, 0 differ, none refused")


def naive(whole: str, stop: str) -> tuple[str, bool]:
    at = whole.find(stop)
    return (whole, False) if at < 0 else (whole[:at], True)


@pytest.mark.parametrize("name", STREAMED)
def test_streams(name: str, tmp_path: Path) -> None:
    """All pieces are the whole text, and stop strings end it where a plain search finds them."""
    demand_check()
    file = tokenizer_file(name, tmp_path)
    tokenizer, rng = opened(file), random.Random(name)
    requests: list[dict[str, Any]] = []
    wholes: list[str] = []
    for text in drawn_texts(many(5924, 200)):
        if len(text) > 10_000:
            continue
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        at = rng.randrange(len(whole) + 1)
        stops = [whole[at : at + rng.randrange(1, 6)], rng.choice(["\n\n", "the", "never written"])]
        chosen = [stop for stop in stops[: rng.choice([1, 1, 1, 2])] if stop]
        requests += [{"tokens": tokens, "stop": []}, {"tokens": tokens, "stop": chosen}]
        wholes += [whole, whole]
    found = drawn({"streams": {"tokenizer": str(file), "requests": requests}}, tmp_path)["streams"]
    wrong, searched = [], 0
    for request, whole, mine in zip(requests, wholes, found, strict=True):
        match request["stop"]:
            case []:
                wanted = (whole, False)
            case [stop]:
                wanted = naive(whole, stop)
            case _:
                wanted = None
        # Which stop string is complete first depends on where tokens end; so does what stands for half a character.
        if wanted is None or BROKEN in whole:
            stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False), request["stop"])
            pieces = [*(stream.push(token) for token in request["tokens"]), stream.flush()]
            wanted = ("".join(pieces), stream.stopped)
        searched += bool(request["stop"])
        if ("".join(mine["pieces"]), mine["stopped"]) != wanted:
            wrong.append((request, mine, wanted))
    print(f"\nstreams, {name}: {len(requests) - searched} whole, {searched} with stop strings, {len(wrong)} differ")
    assert wrong == []


def shapes() -> Iterator[tuple[str, Any]]:
    """Rows of logits [8, V]."""
    rng = np.random.default_rng(3)
    yield "normal", rng.standard_normal((8, 1000)) * 3
    yield "ties", np.round(rng.standard_normal((8, 300)) * 2)
    yield "one peak", np.where(np.arange(500) == 77, 30.0, rng.standard_normal((8, 500)))
    yield "flat", rng.standard_normal((8, 400)) * 1e-3
    yield "mostly impossible", np.where(rng.random((8, 600)) < 0.9, -np.inf, rng.standard_normal((8, 600)))
    yield "wide", np.log(rng.pareto(1.1, (8, 32_000)) + 1e-3)


def drawn_request(rng: random.Random, vocab: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": rng.choice([0.0, 1e-4, 0.3, 0.7, 1.0, 1.5, 5.0]),
        "top_k": rng.choice([0, 0, 1, 5, 40, 10**6]),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.5]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.1, 1.5]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.7, -0.4]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.3, -0.2]),
        "seed": rng.choice([rng.randrange(100), rng.randrange(2**64), 2**64 - 1]),
    }
    if rng.random() < 0.3:
        values["logit_bias"] = {str(rng.randrange(vocab)): rng.choice([-100.0, -1.5, 2.5, 20.0]) for _ in range(4)}
    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
    return values | {"prompt": prompt, "max_tokens": rng.randrange(1, 61)}


def python_sample(request: dict[str, Any], rows: Any, place: int) -> list[int]:
    given = {key: value for key, value in request.items() if key not in ("prompt", "max_tokens")}
    given["logit_bias"] = {int(token): bias for token, bias in request.get("logit_bias", {}).items()}
    sampler = Sampler(Sampling(**given), request["prompt"], rows.shape[1])
    return [sampler.next(rows[(place + step) % len(rows)]) for step in range(request["max_tokens"])]


@pytest.mark.parametrize("shape", [name for name, _ in shapes()])
def test_samples(shape: str, tmp_path: Path) -> None:
    demand_check()
    rows = dict(shapes())[shape].astype("<f4")
    (tmp_path / "rows.bin").write_bytes(rows.tobytes())
    rng = random.Random(shape)
    requests = [drawn_request(rng, rows.shape[1]) for _ in range(many(180, 30))]
    given = {"rows": str(tmp_path / "rows.bin"), "vocab": rows.shape[1], "requests": requests}
    found = drawn({"samples": given}, tmp_path)["samples"]
    wanted = [python_sample(request, rows, place) for place, request in enumerate(requests)]
    tokens = sum(map(len, wanted))
    wrong = [request for request, mine, theirs in zip(requests, found, wanted, strict=True) if mine != theirs]
    print(f"\nsamples, {shape}: {len(requests)} requests, {tokens} tokens, {len(wrong)} requests differ")
    assert wrong == []


ODD: tuple[Any, ...] = (None, -1, 1 << 62, 1e300, True, "", "../x", [], {}, [-1])  # in place of what model.json says


def damaged(content: dict[str, Any], count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Builds of which a key is gone, or says something else."""
    rng = random.Random(8)
    for key in content:
        yield key, {name: value for name, value in content.items() if name != key}
    while True:
        key = rng.choice([*content])
        yield key, content | {key: rng.choice(ODD)}


def spoiled(text: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, removed or added."""
    changed = bytearray(text)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.randrange(40)]
            case 2:
                changed[at:at] = rng.choice([b"9999999", b"-1", b"[[", b"null", b"\\u0000", b"{}", b"1e308", b"\xff"])
            case _:
                changed[at:at] = changed[max(0, at - rng.randrange(60)) : at]
    return bytes(changed)


def test_damage(tmp_path: Path) -> None:
    """Whatever is wrong with a build, the outcome is one line or a build: nothing ends the process."""
    demand_check()
    build = tiny_build("attention", tmp_path / "build")
    whole = (build / "model.json").read_bytes()
    content, rng = json.loads(whole), random.Random(9)
    table, tokenizer = content["embedding"]["path"], content["tokenizer"]["path"]
    texts = {
        name: json.dumps(maker.made(name), ensure_ascii=False).encode()
        for name in ("gpt2", "bert", "metaspace", "qwen")
    }
    folders: list[str] = []

    def add(manifest: bytes | None = whole, tokens: bytes | None = None, cut: bool = False) -> None:
        folder = tmp_path / f"b{len(folders)}"
        folders.append(str(folder))
        for path in (table, tokenizer):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if manifest is not None:
            (folder / "model.json").write_bytes(manifest)
        data = (build / table).read_bytes() if cut else b""
        (folder / table).write_bytes(data[: rng.randrange(len(data))]) if cut else os.link(
            build / table, folder / table
        )
        (folder / tokenizer).write_bytes(tokens) if tokens else os.link(build / tokenizer, folder / tokenizer)

    add()
    add(None)
    for _ in range(5):
        add(cut=True)
    for name in ("later", "images", "ungated"):
        add(json.dumps(content | {"uses": [name]}).encode())
    damage = damaged(content, many(60, 40))
    for _ in range(many(60, 40)):
        add(json.dumps(next(damage)[1]).encode())
    known = len(folders)
    for _ in range(many(1000, 100)):
        add(spoiled(whole, rng))
    for place in range(many(152, 20)):
        add(tokens=spoiled([*texts.values()][place % len(texts)], rng))
    said = drawn({"builds": folders}, tmp_path)["builds"]
    assert said[0] == "" and "is this the folder of a finished build?" in said[1]
    assert all("reads images" in line or "which this version can't run" in line for line in said[7:10])
    odd = [line for line in said if "\n" in line or len(line) > 400 or line.startswith("no error of the package's own")]
    assert odd == []
    refused = [sum(map(bool, part)) for part in (said[:known], said[known:])]
    mutations = len(said) - known
    print(f"\ndamage: {known} builds, {refused[0]} refused; {mutations} mutations, {refused[1]} refused; 0 crashes")


HERMES = find_format("<tool_call>")
VALUES: tuple[Any, ...] = (
    1,
    2.5,
    -3e20,
    True,
    None,
    "a",
    "two\nlines",
    'a "quote" {',
    "</tool_call>",
    "\u0301é🏳️‍🌈",
    "\\",
    {"b": []},
    [[{}]],
)
TEXTS = (
    "I look.",
    " ",
    "\n",
    "a < b",
    "<tool",
    "<tool_call",
    "{",
    "}",
    "[",
    "Done, it is.",
    "\u3000",
    "</tool_call>",
    "e\u0301",
)


def drawn_call(rng: random.Random) -> str:
    """A call in one of the spellings that a reader takes, or an object that is none."""
    arguments = {rng.choice(["a", "b", "c d", "é"]): rng.choice(VALUES) for _ in range(rng.randrange(3))}
    call: dict[str, Any] = {
        "name": rng.choice(["turn", "stone.turn", "f"]),
        rng.choice(["arguments", "parameters"]): arguments,
    }
    match rng.randrange(10):
        case 0:
            call = {"a": 1}
        case 1:
            call = call | {"name": 1}
        case 2:
            call = {"name": "f", "arguments": [1]}
        case 3:
            call = {"type": "function", "function": call}
        case 4:
            call = {"arguments": json.dumps(arguments), "name": "f"}
        case 5:
            call = call | {"id": "x1"}
        case 6:
            call = {"name": "f"}
    text = json.dumps(call, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 2]))
    return text if "\\\\n" in text or rng.random() < 0.8 else text.replace("\\n", "\n")


def drawn_answer(rng: random.Random) -> tuple[str, bool]:
    """An answer, and whether it is cut off. None begins with a bracket, where calls without marks are looked for."""
    parts = []
    for _ in range(rng.randrange(5)):
        calls = rng.choice([", ", "\n", ""]).join(drawn_call(rng) for _ in range(rng.choice([1, 1, 1, 2])))
        space, end = rng.choice(["", "\n", " "]), rng.choice(["</tool_call>"] * 5 + ["", "</tool"])
        marked = f"<tool_call>{space}{calls}{space}{end}"
        parts.append(rng.choice([marked, marked, "".join(rng.choices(TEXTS, k=rng.randrange(1, 4)))]))
    answer = "".join(parts)
    answer = f"Hm. {answer}" if answer.lstrip()[:1] in ("{", "[") else answer
    if rng.random() < 0.8:
        return answer, False
    return answer[: rng.randrange(len(answer) + 1)], True


def server_calls(answer: str) -> tuple[str, list[Any]]:
    """The text and the calls that the server reads in an answer; of a call that is cut off, as far as it goes."""
    assert HERMES
    reader, text, calls = CallReader(HERMES, {}), "", list[list[str]]()
    for delta in [*reader.push(answer), *reader.finish()]:
        if delta.kind == "content":
            text += delta.text
        elif delta.kind == "call":
            calls.append([delta.text, ""])
        else:
            calls[-1][1] += delta.text
    return text, [[name, loaded(arguments)] for name, arguments in calls]


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments, strict=False)
    except ValueError:
        return arguments


def test_calls(tmp_path: Path) -> None:
    """JSON calls in marks are those that the server reads. One that is cut off is text here, and half a call there."""
    demand_check()
    rng = random.Random(6)
    answers = [drawn_answer(rng) for _ in range(many(10_000, 2000))]
    found = drawn({"answers": [answer for answer, _ in answers]}, tmp_path)["answers"]
    wrong, halves, called = [], 0, 0
    for (answer, cut), mine in zip(answers, found, strict=True):
        text, calls = server_calls(answer)
        ours = [[name, loaded(arguments)] for name, arguments in mine["calls"]]
        half = cut and bool(calls) and ours == calls[:-1]
        halves, called = halves + half, called + len(calls)
        if not half and (ours, mine["text"]) != (calls, text):
            wrong.append((answer, mine, text, calls))
    print(f"\ncalls: {len(answers)} answers, {called} calls, {halves} cut off, {len(wrong)} differ")
    assert called > len(answers) / 2 and wrong == []
