"""What to try after gates have failed: which did and where, and the next lines for the config.

Whether Core ML takes a program, runs it on the Neural Engine and gives equal results in all widths may depend on the
form, so there is a next form to try, in the order of docs/program-forms.md. What weights lost, more bits bring back.
Nothing in a config mends a program that is not the model's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from shardmill.config import Config, Convert
from shardmill.files import read_json
from shardmill.forms.form import FP16, INT8
from shardmill.gates.thresholds import COST, PLACEMENT, PROGRAM, WIDTHS, WITNESS
from shardmill.models import DECODER
from shardmill.models.interface import FIXED, HOST, NATIVE
from shardmill.pipeline import storage
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.made import gates
from shardmill.pipeline.scheduling import failed_jobs
from shardmill.printable import one_line
from shardmill.runtime.judged import MISSED, PASSED, Judgement, judged

COREML = "coreml"  # the engine's name in verdicts
SIZES = ("W1", "W2")  # rules on the size of a program's weights
UNLOADED = "can't be loaded"  # in the line of a gate whose program Core ML did not take
ELSEWHERE = "Not all would run on the Neural Engine; in another form it may (docs/program-forms.md)."
OTHERWISE = "Core ML computes passes of some width otherwise; in another form it may not (docs/program-forms.md)."
BITS = (
    "Weights of more bits lose less (docs/precision.md). Where another engine passes the same packages, the engine is "
    "the reason."
)
WIDE = (
    "What is lost is not lost by the weights, which have 16 bits, but by the engine's fp16: `shardmill audit-range` on "
    "Linux shows the largest values of each layer (docs/precision.md)."
)
WRONG = (
    "the program does not compute what the model does, or not the same in every way to cut a text. No key of the "
    "config changes that: it is a fault of shardmill, or of the engine. Please report it, with the file above."
)


@dataclass(frozen=True)
class Advice:
    """What to do about failed gates.

    Attributes:
        words: a sentence or two.
        lines: of YAML, a key of the config with its value.
    """

    words: str
    lines: str = ""


def advise(batch: Batch, workflow: Any) -> None:
    """Print which gates of a run failed and what to try next, unless it is a batch or its files lie elsewhere."""
    if batch.listed or storage.is_used(workflow):
        return
    rules = {rule.name for rule in gates(workflow)}
    ended = [job for job in failed_jobs(workflow.scheduler) if job.rule.name in rules]
    for model in sorted({job.wildcards.model for job in ended}):
        files = {Path(job.output.verdict) for job in ended}
        for line in told(Path("build") / model, batch.models[model], files):
            print(line, file=sys.stderr)


def told(build: Path, config: Config, ended: Collection[Path] = ()) -> Iterator[str]:
    """Yield the lines that a person reads about the failed gates of a build.

    Args:
        build: the folder.
        config: its config.
        ended: verdicts whose jobs have failed; a process that was killed says nothing.
    """
    every = judged(build)
    failed = [one for one in every if one.state != PASSED and (one.said or one.verdict in ended)]
    yield f"shardmill: {build}: {len(failed)} of {len(every)} gates failed, so there is no model.json:"
    for one in failed:
        yield f"  {one_line(one.line)}"
        yield f"    {one.verdict if one.state == MISSED else one.log}"
    for advice in remedies(build, config, failed):
        yield f"shardmill: {advice.words}"
        if advice.lines:
            yield from ("", *advice.lines.splitlines(), "")
    command = f'generate {build} --ungated --prompt "def "' if config.kind == DECODER else f"serve {build} --ungated"
    yield f"shardmill: to run what is there, marked as ungated: shardmill {command}"


def remedies(build: Path, config: Config, failed: Sequence[Judgement]) -> Iterator[Advice]:
    """Yield what to do about failed gates of a build, by kind of failure."""
    away = [one for one in failed if UNLOADED in one.said or _missed(one, PLACEMENT)]
    if away:
        yield _next_form(build, config, away, ELSEWHERE)
    apart = [one for one in failed if _missed(one, WIDTHS) and one.content["engine"]["name"] == COREML]
    if apart and not away:
        yield _next_form(build, config, apart, OTHERWISE)
    if any(_missed(one, COST) for one in failed):
        yield _more_bits(config)
    wrong = [one for one in failed if _missed(one, PROGRAM, WITNESS) or (_missed(one, WIDTHS) and one not in apart)]
    if wrong:
        yield Advice(f"{', '.join(f'{one.gate} {one.part}' for one in wrong)}: {WRONG}")


def _numbers(one: Judgement) -> dict[str, str]:
    """Return the numbers that have missed their thresholds, with the question that each of them answers."""
    return {row["name"]: row["question"] for row in one.content.get("gate", ()) if not row["passed"]}


def _missed(one: Judgement, *questions: str) -> bool:
    """Return whether a number that answers one of the questions has missed its threshold."""
    return any(question in questions for question in _numbers(one).values())


def _next_form(build: Path, config: Config, failed: Sequence[Judgement], words: str) -> Advice:
    """Return the next form to try for the parts of failed gates."""
    for key, reason, changed in _forms(build, config, failed):
        where = f"in the config, in place of its `{key}` if it has one"
        return Advice(f"{words} Next try: {reason}; {where}:", _as_yaml(changed, key))
    return Advice(f"{words} No other is left. A kit finds out more: shardmill device kit {build} --ungated")


def _forms(build: Path, config: Config, failed: Sequence[Judgement]) -> Iterator[tuple[str, str, Config]]:
    """Yield forms that the config does not have, in the order in which to try them: key, reason and config."""
    program = config.program
    rows = [row for one in failed for row in one.content.get("rows", ()) if row["status"] in _numbers(one)]
    errors = [each for one in failed for each in one.content.get("findings", ()) if each["severity"] == "error"]
    if rows and {row["operation"].rpartition(".")[2] for row in rows} == {"silu"} and program.silu == NATIVE:
        yield "program", "SiLU from tanh, since nothing but SiLU is elsewhere", _with(config, silu="tanh")
    if config.kind == DECODER and (rows or not errors or {each["rule"] for each in errors}.difference(SIZES)):
        if program.shapes != FIXED:
            reason = "a function for each width, none with flexible shapes"
            yield "program", reason, _with(config, shapes="fixed", reshape_frequency="infrequent")
        if program.state != HOST:
            yield "program", "the host keeps the caches, so programs have no states", _with(config, state="host")
    yield from _smaller(build, config, {one.part for one in failed})


def _with(config: Config, **changes: Any) -> Config:
    return replace(config, program=replace(config.program, **changes))


def _smaller(build: Path, config: Config, names: set[str]) -> Iterator[tuple[str, str, Config]]:
    """Yield the config with the parts of these names cut in two; the LM head only if no layers are among them."""
    halves: list[tuple[int, int]] = []
    for place, (start, end) in enumerate(config.ranges):
        middle = (start + end) // 2
        of_buckets = config.parts[place :: len(config.ranges)] if config.kind != DECODER else ()
        cut = start < middle and not names.isdisjoint((f"layers_{start:02d}_{end:02d}", *of_buckets))
        halves += [(start, middle), (middle, end)] if cut else [(start, end)]
    if tuple(halves) != config.ranges:
        yield "topology", "smaller parts", replace(config, topology=tuple(halves))
    if config.kind != DECODER:
        return
    vocab = read_json(build / "plan.json")["architecture"]["vocab"]
    more = next((n for n in range(config.slices + 1, vocab + 1) if vocab % n == 0), 0)
    if more and any(name.startswith("head_") for name in names):
        yield "head", "smaller parts", replace(config, head=replace(config.head, slices=more))


def _more_bits(config: Config) -> Advice:
    """Return what to do about weights that lost too much."""
    if config.convert.precision == FP16:
        return Advice(WIDE)
    finer = FP16 if config.convert.precision == INT8 else INT8
    changed = replace(config, convert=Convert(precision=finer, embedding=config.convert.embedding))
    return Advice(f"{BITS} In the config, in place of its `convert` if it has one:", _as_yaml(changed, "convert"))


def _as_yaml(config: Config, key: str) -> str:
    """Return a key of the config as YAML, of a section what differs from its defaults."""
    value = getattr(config, key)
    if key == "topology":
        return f"topology: {[list(part) for part in value]}"
    usual = type(value)()
    chosen = {one.name: getattr(value, one.name) for one in fields(value)}
    chosen = {name: each for name, each in chosen.items() if each != getattr(usual, name) or name == "precision"}
    return yaml.safe_dump({key: {name: list(v) if isinstance(v, tuple) else v for name, v in chosen.items()}}).rstrip()
