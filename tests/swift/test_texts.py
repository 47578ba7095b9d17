"""The Swift package says what the Python runtime says, token for token, whatever the kind of the model."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import adapters
import assistants
import mtp_layers
import program_forms
import pytest
import routed
import tiny
import torch
from drafted_decoding import Sampling, Session, create_drafter
from drafted_decoding.drafters import PLAIN, Draft, RequestInfo
from drafted_decoding.generate import GenerationResult, Options, TokenEvent, generate
from drafted_decoding.policies import AlwaysDraft, PassReport
from drafting import Recorded
from models import tiny_families

from shardmill.machine import is_portable, load_programs_as
from shardmill.runtime.adding import add_adapter
from shardmill.runtime.drafter import load_drafter
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import entries, in_place

from .programs import ROOT, demand_check, script

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="the pipe's programs run on the portable engine"),
    pytest.mark.slow,
]
BUILDS = "SHARDMILL_SWIFT_BUILDS"  # further folders of finished builds, with the system's path separator between them
PROMPTS, NEW, CONTEXT = 20, 100, 256
LARGE, FEW, SHORT = 1 << 27, 4, 30  # bytes of programs from which on there are so few prompts, and so few new tokens
SEEDED = (
    {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"temperature": 1.1, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 2**63 + 5}
    | {"presence_penalty": 0.4, "frequency_penalty": 0.2},
)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the family and the form of its programs
    "attention": ("phi3", {}),
    "sliding ring": ("gemma3_text", {}),
    "convolution's ring": ("lfm2", {}),
    "routed experts": ("granitemoe", {}),
    "rows for each layer": ("gemma4_text", {}),
    "caches of other parts": ("gemma4_text", {"shapes": "fixed", "state": "host", "contexts": [40, 96]}),
    "host caches": ("lfm2", {"shapes": "fixed", "state": "host"}),
    "fixed functions": ("phi3", {"shapes": "fixed"}),
    "lengths": ("phi3", {"shapes": "fixed", "contexts": [40, 96]}),
    "lengths, rings and host caches": ("lfm2", {"shapes": "fixed", "state": "host", "contexts": [40, 96]}),
    "recurrence": ("qwen3_5_text", {}),
    "recurrence in blocks, lengths and host states": (
        "qwen3_5_text",
        {"shapes": "fixed", "state": "host", "contexts": [40, 96]},
    ),
}
Answer = Mapping[str, Any]
Ask = Callable[[dict[str, Any]], Answer]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def finished(build: tiny.Build, folder: Path) -> Path:
    """A folder whose model.json names programs inside it."""
    manifest = json.loads(json.dumps(in_place(build.plan, build.packages, build.table)))
    manifest["tokenizer"] = {"path": str(build.source / "tokenizer.json")}
    for entry in entries(manifest):
        entry["path"] = str(Path(entry["path"]).resolve().relative_to(folder.resolve()))
    (folder / "model.json").write_text(json.dumps(manifest))
    return folder


def tiny_build(kind: str, folder: Path) -> Path:
    """A tiny model of a kind."""
    family, program = KINDS[kind]
    programs = folder / "programs"
    if kind == "routed experts":
        source = routed.checkpoint(family, folder)
        return finished(routed.build(source, programs, routed.GROUPS[family], context=CONTEXT), folder)
    checkpoint = folder / "checkpoint"
    written = tiny.write_checkpoint(checkpoint) if family == "phi3" else tiny_families.write_tiny(family, checkpoint)
    programs.mkdir()
    source = tiny.fetched(written, folder / "source")
    changes: dict[str, Any] = {"topology": "auto", "head": {"slices": 2}, "context": CONTEXT}
    changes |= {"tokens": {"max": 16, "verify": 4}} if "blocks" in kind else {}
    changes |= {"topology": [[0, 4], [4, 6], [6, 8]]} if kind == "caches of other parts" else {}
    return finished(program_forms.build(source, programs, program, **changes), folder)


def drawn_prompts(vocab: int) -> list[list[int]]:
    """Prompts of many lengths; some begin alike, and some repeat themselves, so that drafts are right."""
    rng = random.Random(3)
    found: list[list[int]] = []
    for place in range(PROMPTS):
        fresh = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, 40))]
        found.append({0: fresh, 1: (fresh[:5] * 8)[:37], 2: found[-1][:7] + fresh if found else fresh}[place % 3])
    return found


def conversation(
    ask: Ask, prompts: Sequence[Sequence[int]], new: int, adapters: Sequence[str | None] = (None,)
) -> list[tuple[dict[str, Any], Answer]]:
    """Ask for texts, every other one seeded; for three turns; and for texts that are cancelled and go on.

    Each prompt is for each adapter, one after the other.
    """
    asked: list[tuple[dict[str, Any], Answer]] = []

    def say(prompt: Sequence[int], tokens: int = new, **changes: Any) -> list[int]:
        request = {"prompt": list(prompt), "max_tokens": tokens, **changes}
        asked.append((request, ask(request)))
        return [*prompt, *asked[-1][1]["tokens"]]

    for prompt, sampling in zip(prompts, itertools.cycle(({}, SEEDED[0], {}, SEEDED[1])), strict=False):
        for adapter in adapters:
            say(prompt, **sampling, adapter=adapter)
    for sampling in ({"adapter": adapters[-1]}, SEEDED[0] | {"adapter": adapters[-1]}):
        text: list[int] = []
        for turn in range(3):
            text = say([*text, *prompts[turn][:12]], 30, **sampling)
        text = say(prompts[3], cancel_after=17, **sampling)
        say(text, 20, **sampling)
        say(prompts[3], cancel_after=1, **sampling)
        say(prompts[3], 40, **sampling)
    return asked


def python_answers(
    session: Session, manifest: Mapping[str, Any], request: Mapping[str, Any], **drafting: Any
) -> Answer:
    """Return what the Python runtime answers, in the words of shardmill-check."""
    given = {key: request[key] for key in request if key not in ("prompt", "max_tokens", "cancel_after", "adapter")}
    session.use_adapter(request.get("adapter"))
    events = generate(
        session,
        request["prompt"],
        max_new_tokens=request["max_tokens"],
        eos=manifest["eos_token_ids"],
        options=Options(Sampling(**given), guard_margin=manifest.get("margin", 0.0)),
        **drafting,
    )
    found: list[int] = []
    for event in events:
        if isinstance(event, TokenEvent):
            found.append(event.token)
            if len(found) == request.get("cancel_after"):
                events.close()
                return {"tokens": found, "reason": "cancelled"}
        elif isinstance(event, GenerationResult):
            cost = {"prompt_tokens": event.prompt_tokens, "reused": event.reused_tokens, "passes": event.passes}
            return {"tokens": found, "reason": event.finish_reason, **cost}
    raise AssertionError("a generation ends with a result")


def swift_answers(build: Path, requests: Sequence[Mapping[str, Any]], folder: Path, pipe: Any = None) -> list[Answer]:
    """Return what shardmill-check answers, in one session; `pipe` is a module in place of pipe_engine.py."""
    file = folder / "requests.json"
    file.write_text(json.dumps(requests))
    (report,) = (pipe or script("pipe_engine")).serve([*demand_check(), str(build), "--requests", str(file)])
    answers: list[Answer] = report["requests"]
    return answers


def assert_same_texts(
    build: Path,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    new: int = NEW,
    adapters: Sequence[str | None] = (None,),
) -> list[tuple[dict[str, Any], Answer]]:
    """Compare both runtimes without drafts in everything but time, and with drafts in tokens; return the answers."""
    manifest = json.loads((build / "model.json").read_text())
    with load_programs_as("fp32"):
        session = Session(Engine(manifest, build))
    asked = conversation(lambda request: python_answers(session, manifest, request), prompts, new, adapters)
    plain = swift_answers(build, [request for request, _ in asked], folder)
    assert [{key: mine[key] for key in wanted} for mine, (_, wanted) in zip(plain, asked, strict=True)] == [
        wanted for _, wanted in asked
    ]
    # The length of drafts follows measured times, so a model may be too fast for lookups; to recite always pays.
    drafters = itertools.cycle(("suffix", "ngram", "recite", *(["head"] if "drafter" in manifest else [])))
    drafted = [
        request | {"drafter": drafter} | ({"recite": wanted["tokens"]} if drafter == "recite" else {})
        for (request, wanted), drafter in zip(asked, drafters, strict=False)
    ]
    found = swift_answers(build, drafted, folder)
    keys = ("tokens", "reason")
    assert [[mine[key] for key in keys] for mine in found] == [[wanted[key] for key in keys] for _, wanted in asked]
    assert sum(mine["accepted"] for mine in found) > 0
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_say_the_same(kind: str, tmp_path: Path) -> None:
    demand_check()
    build = tiny_build(kind, tmp_path)
    vocab = json.loads((build / "model.json").read_text())["vocab"]
    assert_same_texts(build, drawn_prompts(vocab), tmp_path)


@pytest.mark.parametrize("program", [{"shapes": "fixed", "contexts": [40, 96]}, {"state": "host"}])
def test_adapters_say_the_same(program: dict[str, Any], tmp_path: Path) -> None:
    """Each in turn with the bare model, whose texts are others."""
    demand_check()
    made = adapters.build(tmp_path / "build", "phi3", program | {"adapters": 8}, context=CONTEXT)
    for seed, name in enumerate(("one", "two")):
        lora = adapters.write_lora(made / "source", tmp_path / name, seed)
        add_adapter(made, lora, name)
    vocab = json.loads((made / "model.json").read_text())["vocab"]
    asked = assert_same_texts(made, drawn_prompts(vocab)[:4], tmp_path, adapters=(None, "one", "two"))
    assert len({tuple(answer["tokens"]) for _, answer in asked[:3]}) == 3
    assert any(wanted.get("reused") for request, wanted in asked if request["adapter"])


def test_an_adapter_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    """In the middle of a text, which goes on; the next one is fed from its beginning, and the one after that is not."""
    demand_check()
    made = adapters.build(tmp_path / "build", "phi3", {"state": "host", "adapters": 8}, context=CONTEXT)
    manifest = json.loads((made / "model.json").read_text())
    old, new = (adapters.write_lora(made / "source", tmp_path / str(seed), seed) for seed in range(2))
    with load_programs_as("fp32"):
        session = Session(Engine(manifest, made))
    request, wanted = {"prompt": list(range(5, 15)), "max_tokens": 20, "adapter": "one"}, list[Answer]()
    for lora in (old, new, new):
        add_adapter(made, lora, "one")
        wanted.append(python_answers(session, manifest, request))
    assert wanted[0]["tokens"] != wanted[1]["tokens"] and [one["reused"] for one in wanted] == [0, 0, 9]
    add_adapter(made, old, "one")
    pipe, runs = script("pipe_engine"), itertools.count()
    run = pipe.Server.run

    def replacing(server: Any, header: Any, arrays: Any) -> Any:
        if next(runs) == 30:  # of a hundred runs for the first text
            add_adapter(made, new, "one")
        return run(server, header, arrays)

    pipe.Server.run = replacing
    found = swift_answers(made, [request] * 3, tmp_path, pipe)
    assert [{key: mine[key] for key in wanted[0]} for mine in found] == wanted


LENGTHS = {"shapes": "fixed", "state": "host", "contexts": [40, 96]}


def with_assistant(folder: Path, kind: str, program: dict[str, Any]) -> tiny.Build:
    """A tiny Gemma 4 with its assistant."""
    model, helper = assistants.target(kind), assistants.assistant(kind)
    return assistants.build(folder, model, helper, context=CONTEXT, program=program)


def with_mtp(folder: Path, **changes: Any) -> tiny.Build:
    """A tiny Qwen3.5 with its MTP layer; random weights guess some tokens of so small a vocabulary."""
    model = mtp_layers.target(vocab_size=12)
    source = tiny.fetched(mtp_layers.write(model, mtp_layers.drawn(model), folder / "checkpoint"), folder / "source")
    return tiny.converted(source, folder, quantization="fp16", context=CONTEXT, **mtp_layers.SETTINGS, **changes)


DRAFTERS: dict[str, Callable[[Path], tiny.Build]] = {
    "head": lambda folder: tiny.build_with_head(folder, "fp16", context=CONTEXT),
    "head, lengths": lambda folder: tiny.build_with_head(folder, "fp16", context=CONTEXT, program=LENGTHS),
    "MTP": with_mtp,
    "MTP, lengths": lambda folder: with_mtp(folder, program=LENGTHS, tokens={"max": 16, "verify": 4}),
    "assistant": lambda folder: with_assistant(folder, "gemma4_text", assistants.STATE),
    "assistant, lengths": lambda folder: with_assistant(folder, "gemma4_unified_text", LENGTHS),
}


class Likeliest(Recorded):
    """A drafter that proposes the likeliest tokens whatever the sampling, as in the Swift package."""

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        super().reset(prompt)


class SameLengths(AlwaysDraft):
    """A policy that asks for as many drafts as shardmill-check proposed in each pass, and verifies as many."""

    def __init__(self, passes: Sequence[Mapping[str, Any]]) -> None:
        self.passes = list(passes)

    def limit(self, most: int) -> int:
        return len(self.passes[0]["proposed"])

    def length(self, draft: Draft) -> int:
        found: int = self.passes[0]["drafted"]
        return found

    def observe(self, report: PassReport) -> None:
        del self.passes[0]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_proposes_what_it_does_in_python(kind: str, tmp_path: Path) -> None:
    """And each pass accepts as many of its tokens; the texts are Python's without drafts."""
    demand_check()
    build = finished(DRAFTERS[kind](tmp_path), tmp_path)
    manifest = json.loads((build / "model.json").read_text())
    with load_programs_as("fp32"):
        session = Session(Engine(manifest, build))
    prompts = [prompt for prompt in drawn_prompts(manifest["vocab"]) if len(prompt) > 1][:4]
    asked = conversation(lambda request: python_answers(session, manifest, request), prompts, 40)
    found = swift_answers(build, [request | {"drafter": "head"} for request, _ in asked], tmp_path)
    assert [mine["tokens"] for mine in found] == [wanted["tokens"] for _, wanted in asked]
    with load_programs_as("fp32"):
        engine = Engine(manifest, build)  # as new as the one in Swift, so that all passes have the same widths
        name, head = manifest["drafter"]["kind"], load_drafter(engine)
    session, drafter = Session(engine), Likeliest(create_drafter(name, head=head))  # type: ignore[arg-type]  # is it
    for (request, _), mine in zip(asked, found, strict=True):
        drafter.rounds.clear()
        python_answers(session, manifest, request, drafter=drafter, policy=SameLengths(mine["drafts"]))
        passes = [(one["proposed"], one["accepted"]) for one in mine["drafts"] if one["proposed"]]
        assert [(list(draft), accepted) for _, draft, accepted in drafter.rounds] == passes
    assert sum(mine["drafted"] for mine in found) > 40
    assert sum(mine["accepted"] for mine in found) > 10 or "MTP" not in kind  # the others' weights guess too little


@pytest.mark.parametrize("build", ["build/demo", *os.environ.get(BUILDS, "").split(os.pathsep)])
def test_finished_builds_say_the_same(build: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    demand_check()
    folder = ROOT / build
    if not build or not (folder / "model.json").is_file():
        pytest.skip(f"{folder} is no finished build: snakemake --cores 4 all makes the demo; {BUILDS} names others")
    manifest = json.loads((folder / "model.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / manifest["tokenizer"]["path"]))
    lines = tiny.sample_text().splitlines()
    texts = ["\n".join(lines[place * 7 : place * 7 + 1 + place % 5]) for place in range(PROMPTS)]
    prompts = [tokenizer.encode(text).ids or [1] for text in texts]
    large = sum(part["program"]["bytes"] for part in manifest["parts"]) > LARGE
    assert_same_texts(folder, prompts[:FEW] if large else prompts, tmp_path, SHORT if large else NEW)
    copy = tmp_path / "text.json"
    copy.write_text(json.dumps([{"text": texts[3], "max_tokens": 5}]))
    (report,) = script("pipe_engine").serve([*demand_check(), str(folder), "--requests", str(copy)])
    (answer,) = report["requests"]
    assert answer["prompt_tokens"] == len(tokenizer.encode(texts[3]).ids)
    assert answer["text"] == tokenizer.decode(answer["tokens"])


WRONG: dict[str, tuple[list[str], int, str]] = {
    "nothing": ([], 2, "give a build's folder"),
    "unknown option": (["build", "--fast", "1"], 2, "there is no option --fast"),
    "no requests": (["build"], 2, "give --requests FILE"),
    "no value": (["build", "--requests"], 2, "--requests needs a value"),
    "unknown engine": (["build", "--requests", "r.json", "--engine", "gpu"], 2, "--engine is coreml or pipe"),
    "missing requests": (["build", "--requests", "none.json"], 1, "none.json can't be read"),
    "unknown key": (["build", "--requests", "key.json"], 1, "a request has the unknown key 'top'"),
    "wrong type": (["build", "--requests", "type.json"], 1, "[0].max_tokens is no Int"),
    "no build": (["build", "--requests", "good.json"], 1, "model.json can't be read"),
    "no tokenizer": (["tokenize", "none.json", "good.json", "out.json"], 1, "none.json can't be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_build_or_argument_is_one_line(name: str, tmp_path: Path) -> None:
    arguments, code, reason = WRONG[name]
    for file, request in (("good", {}), ("key", {"top": 1}), ("type", {"max_tokens": "many"})):
        (tmp_path / f"{file}.json").write_text(json.dumps([{"prompt": [1], **request}]))
    done = subprocess.run([*demand_check(), *arguments], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert reason in done.stderr


def test_a_damaged_build_is_one_line(tmp_path: Path) -> None:
    demand_check()
    build = tiny_build("attention", tmp_path)
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps([{"prompt": [1], "max_tokens": 2}, {"prompt": [1, 256], "max_tokens": 2}]))
    command = [*demand_check(), str(build), "--requests", str(requests)]
    serve = script("pipe_engine").serve
    errors = []
    for spoil in (lambda: None, lambda: shutil.rmtree(next((build / "programs").glob("head_*")))):
        spoil()
        with (tmp_path / "errors").open("w") as stream, pytest.raises(subprocess.CalledProcessError) as raised:
            serve(command, stderr=stream)
        errors.append((tmp_path / "errors").read_text())
        assert raised.value.returncode == 1 and errors[-1].count("\n") == 1
    assert "the prompt holds token 256" in errors[0] and "head_" in errors[1]
