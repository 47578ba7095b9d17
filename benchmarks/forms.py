"""Do all forms of a model's programs say the same, whatever drafts?

    python benchmarks/forms.py CHECKPOINT [--prompts 20] [--tokens 100] [--drafters ngram learned] [--json OUT.json]

The checkpoint is split in two parts of layers and a head, and converted in INT8 in every form (docs/program-forms.md).
Single tokens through the programs of form `range` say what is right. Then every form decodes every prompt with every
drafter, always drafting, in fp32, and each token is compared. A drafter's session is one for all prompts: every second
prompt goes on where an answer before it was cut off, so that a prefix is taken over and wrong drafts lie behind it. The
draft model is the model's own first half under its head; what it drafts after a text is computed once for all forms.
Prompts are those of the benchmark's tasks, in several lengths. The exit code is 1 if any token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from exactness import LENGTHS, TASKS

from shardmill import config, machine
from shardmill.bench.prompts import of_tasks
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.fetch import fetch
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.table import write_table
from shardmill.decode import DRAFTERS, Drafter, Session, create_drafter, run
from shardmill.decode.drafters.base import Draft
from shardmill.decode.drafters.draft_model import DraftModelDrafter
from shardmill.decode.policies import AlwaysDraft
from shardmill.imports import quiet_coremltools
from shardmill.models.hf_config import load_hf_config
from shardmill.pipeline.steps.split import split
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place

LADDER = ", shorter contexts"
FORMS: dict[str, dict[str, str]] = {
    "range": {},
    "fixed": {"shapes": "fixed"},
    f"fixed{LADDER}": {"shapes": "fixed"},
    "range, host": {"state": "host"},
    "fixed, host": {"shapes": "fixed", "state": "host"},
    f"fixed, host{LADDER}": {"shapes": "fixed", "state": "host"},
    "enumerated, host": {"shapes": "enumerated", "state": "host"},
}
CUT = 2  # of an answer, one in so many tokens is kept in the prompt that goes on from it
WIDEST = 8
Case = tuple[list[int], Sequence[int]]  # a prompt, and the tokens after it


@dataclass(frozen=True)
class Row:
    """A form with a drafter: how many tokens it was compared on, and how many were other ones."""

    form: str
    drafter: str
    tokens: int
    different: int
    drafted: int
    rejected: int
    reused: int
    seconds: float


@dataclass(frozen=True)
class Made:
    """A checkpoint converted in a form: model.json's content, and the bytes of its packages."""

    manifest: dict[str, Any]
    bytes: int

    def engine(self, parts: int | None = None) -> Engine:
        """Return its engine in fp32, of so many parts of layers."""
        layers = [part for part in self.manifest["parts"] if part["kind"] == "layers"][:parts]
        heads = [part for part in self.manifest["parts"] if part["kind"] == "head"]
        with quiet_coremltools(), machine.load_programs_as("fp32"):
            return Engine({**self.manifest, "parts": [*layers, *heads]}, Path("/"))


class OncePerText(DraftModelDrafter):
    """A draft model that is asked once for each text; it drafts the same whatever the form of the target is."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(Session(engine), vocab=engine.vocab)
        self.known: dict[tuple[tuple[int, ...], int], Draft] = {}

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        key = tuple(context), limit
        if key not in self.known:
            self.reset(context)  # texts that were known are not in its cache
            self.known[key] = super().propose(context, limit)
        return self.known[key]


def chosen(form: str, context: int, shorter: Sequence[int]) -> dict[str, Any]:
    """Return what a config says of a form, in `program`."""
    return FORMS[form] | ({"contexts": [n for n in shorter if n < context]} if form.endswith(LADDER) else {})


def made(source: Path, folder: Path, program: dict[str, Any], context: int) -> Made:
    """Return the programs of a fetched checkpoint in a form."""
    layers = load_hf_config(source).get_text_config().num_hidden_layers
    content = {
        "model": "forms",
        "source": {"path": str(source)},
        "context": context,
        "topology": [[0, layers // 2], [layers // 2, layers]],
        "head": {"slices": 1},
        "tokens": {"max": WIDEST},
        "program": program,
    }
    files = json.loads((source / "source.json").read_text())["files"]
    parts, plan = split(source, config.parse(content), HashCache(folder / "hashes"), files)
    packages, table = {}, folder / "embedding.safetensors"
    for part in parts:
        if part.kind == "embedding":
            write_table(part, source, table, 1)
            continue
        packages[part.name] = folder / f"{part.name}.mlpackage"
        with quiet_coremltools():
            convert_stamped(part, source, "int8", packages[part.name], folder / "templates")
    size = sum(file.stat().st_size for package in packages.values() for file in package.rglob("*") if file.is_file())
    return Made(json.loads(json.dumps(in_place(plan, packages, table))), size)


def texts(source: Path, folder: Path, count: int, room: int) -> list[list[int]]:
    """Return prompts of up to `room` tokens, evenly taken from all tasks in all lengths."""
    tokenizer = read_tokenizer(source / "tokenizer.json")
    found = of_tasks(folder, TASKS, 99, lambda text: tokenizer.encode(text).ids)
    cut = [[*prompt.tokens][-length:] if length else [*prompt.tokens] for prompt in found for length in LENGTHS]
    fitting = [text for text in cut if len(text) <= room]
    return [fitting[index * len(fitting) // count] for index in range(count)]


def answers(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> list[Case]:
    """Return prompts with what single tokens say after them; after each prompt one that goes on within its answer."""
    session, found = Session(engine), []
    for prompt in prompts:
        answer = run(session, prompt, max_new_tokens=tokens).tokens
        longer = [*prompt, *answer[: tokens // CUT], *prompt[-WIDEST:]]
        session.truncate(0)
        found += [(prompt, answer), (longer, run(session, longer, max_new_tokens=tokens).tokens)]
    return found


def compared(form: str, name: str, engine: Engine, drafter: Drafter, cases: Sequence[Case]) -> Row:
    """Return one form with one drafter on all prompts."""
    session, begin = Session(engine), time.perf_counter()
    different = drafted = accepted = reused = 0
    for prompt, expected in cases:
        result = run(session, prompt, max_new_tokens=len(expected), drafter=drafter, policy=AlwaysDraft())
        different += sum(a != b for a, b in zip(result.tokens, expected, strict=True))
        drafted, accepted = drafted + sum(result.drafted), accepted + sum(result.accepted)
        reused += result.reused_tokens
    tokens = sum(len(expected) for _, expected in cases)
    return Row(form, name, tokens, different, drafted, drafted - accepted, reused, time.perf_counter() - begin)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=int, default=20, help="an even number")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 512], help="shorter ones, of two of the forms")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--task-prompts", type=Path, default=Path("resources/tasks"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        home = Path(folder)
        fetch(path=args.checkpoint, repo=None, revision=None, dest=home / "source", cache=HashCache(home / "hashes"))
        builds = {}
        for form in dict.fromkeys(["range", *args.forms]):
            (home / form).mkdir()
            program = chosen(form, args.context, args.contexts)
            builds[form] = made(home / "source", home / form, program, args.context)
        first = builds["range"].engine()
        room = args.context - 2 * args.tokens - WIDEST
        cases = answers(first, texts(home / "source", args.task_prompts, args.prompts // 2, room), args.tokens)
        draft, rows = OncePerText(builds["range"].engine(parts=1)), []
        for form in args.forms:
            engine = first if form == "range" else builds[form].engine()
            for name in args.drafters:
                drafter = draft if name == draft.name else create_drafter(name)
                rows.append(compared(form, name, engine, drafter, cases))
                print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    sizes = {form: one.bytes / builds["range"].bytes for form, one in builds.items()}
    found = {"machine": machine.machine(), "prompts": len(cases), "bytes": sizes, "rows": [asdict(row) for row in rows]}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    for form in args.forms:
        own = [row for row in rows if row.form == form]
        wrong = sum(row.different for row in own)
        tokens, rejected = sum(row.tokens for row in own), sum(row.rejected for row in own)
        print(f"{form:28} {sizes[form]:7.4f} x bytes, {tokens} tokens, {rejected} drafts rejected, {wrong} different")
    sys.exit(any(row.different for row in rows))


if __name__ == "__main__":
    main()
