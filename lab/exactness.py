"""Are greedy tokens the same whatever drafts, and the same as transformers'?

    python lab/exactness.py build/demo [--apart --guard-margin 0.06] [--record OUT.jsonl]

Prompts are those of the benchmark's tasks, each in four lengths: its last 50 tokens, as it is, and behind enough of
the other prompts to make 400 and 800. For each, plain decoding of one token a pass says what is right; then every
drafter under every policy, and Hugging Face transformers in fp32 with the weights dequantised from the packages, say
theirs. No token ends a text, so all are of the full length. The draft model is the model's own first part of layers
under its LM head: often wrong, not always.

Where tokens differ, the first such place is named with the margin between the two best logits that plain decoding had
there. In fp32 rows of wide and single passes differ in the last of 24 bits, in fp16 in the last of 11, so there a near
tie may fall the other way; "rows" says how far apart they are. The portable engine rounds all widths alike in fp16;
--apart has it compute single tokens with fp16 rounding and wide passes in fp32, as Core ML may round each width in a
way of its own. The exit code is 1 if, in fp32, any token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import drafted_decoding as decode
import numpy as np
from drafted_decoding import POLICIES, Options, Session, TokenEvent, create_drafter, create_policy, generate, run
from drafted_decoding.drafters import TRAINED
from drafted_decoding.policies import measure_widths

from shardmill import machine
from shardmill.bench.prompts import of_tasks
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.imports import quiet_coremltools
from shardmill.runtime.engine import Engine

ROOT = Path(__file__).parent.parent
TASKS = ("code_edit", "summary", "question", "copying", "free_text")
LENGTHS = (50, None, 400, 800)  # tokens; None: the prompt as it is
DRAFTERS = tuple(name for name in decode.DRAFTERS if name != "none" and name not in TRAINED)  # see heads.py
ROWS = 400  # positions at which single and wide passes are compared


@dataclass(frozen=True)
class Case:
    """A prompt, what plain decoding says after it, and the margin between the two best logits at each of its tokens."""

    task: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    margins: Sequence[float]


@dataclass(frozen=True)
class Difference:
    """The first token of a case that is another one."""

    case: int
    task: str
    prompt_tokens: int
    at: int
    margin: float


@dataclass
class Score:
    """How one way of decoding fared."""

    name: str
    cases: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    verified_again: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, index: int, case: Case, tokens: Sequence[int]) -> None:
        """Compare a case's tokens."""
        self.cases += 1
        self.tokens += len(tokens)
        different = [i for i, (a, b) in enumerate(zip(tokens, case.tokens, strict=True)) if a != b]
        if different:
            at = different[0]
            self.differences.append(Difference(index, case.task, len(case.prompt), at, case.margins[at]))


def prompts(build: Path, folder: Path, count: int, room: int) -> list[tuple[str, list[int]]]:
    """Return `count` (task, tokens), evenly taken from all tasks' prompts in all lengths up to `room` tokens."""
    tokenizer = read_tokenizer(build / manifest(build)["tokenizer"]["path"])
    all_prompts = of_tasks(folder, TASKS, 99, lambda text: tokenizer.encode(text).ids)
    made = []
    for i, prompt in enumerate(all_prompts):
        others = [token for other in (*all_prompts[i + 1 :], *all_prompts[:i]) for token in other.tokens]
        for length in LENGTHS:
            text = [*others, *prompt.tokens][-length:] if length else [*prompt.tokens]
            if len(text) <= room:
                made.append((str(prompt.group), text))
    step = max(1.0, len(made) / count)
    return [made[int(i * step)] for i in range(min(count, len(made)))]


def manifest(build: Path) -> dict[str, Any]:
    """Return model.json's content."""
    content: dict[str, Any] = json.loads((build / "model.json").read_text())
    return content


def load(build: Path, precision: str, apart: bool = False) -> tuple[Engine, Engine]:
    """Load the model, and as its draft model its first part of layers under the same head."""
    sys.path.insert(0, str(ROOT / "tests"))
    from apart import installed

    content = manifest(build)
    heads = [part for part in content["parts"] if part["kind"] == "head"]
    first = next(part for part in content["parts"] if part["kind"] == "layers")
    with quiet_coremltools(), machine.load_programs_as(precision), installed() if apart else nullcontext():
        return Engine(content, build), Engine({**content, "parts": [first, *heads]}, build)


def plain(session: Session, task: str, prompt: Sequence[int], count: int) -> Case:
    """Decode one token a pass."""
    hold(session, prompt)
    events = generate(session, prompt, max_new_tokens=count, options=Options(top_logprobs=2))
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    margins = [event.top[0][1] - event.top[1][1] for event in tokens]
    return Case(task, prompt, [event.token for event in tokens], margins)


def hold(session: Session, prompt: Sequence[int]) -> None:
    """Run the prompt from its first token on, in the same passes each time: in fp16 they decide the last bits."""
    session.truncate(0)
    session.prefill(prompt)


def compare(
    session: Session,
    draft: Session,
    cases: Sequence[Case],
    names: Sequence[str],
    policies: Sequence[str],
    margins: Sequence[float],
) -> Iterator[Score]:
    """Yield the score of every drafter under every policy. Both are kept from case to case, as in a server."""
    costs = measure_widths(session.engine)
    ways = {
        (name, policy, margin): (
            create_drafter(name, draft_session=draft),
            create_policy(policy, session.widths, costs=costs),
            Score(f"{name}, {policy}" + (f", guard {margin:g}" if margin else "")),
        )
        for name in names
        for policy in policies
        for margin in margins
    }
    for index, case in enumerate(cases):
        hold(session, case.prompt)
        for (_, _, margin), (drafter, policy, score) in ways.items():
            result = run(
                session,
                case.prompt,
                max_new_tokens=len(case.tokens),
                drafter=drafter,
                policy=policy,
                options=Options(guard_margin=margin),
            )
            score.add(index, case, result.tokens)
            score.passes += result.passes
            score.drafted += sum(result.drafted)
            score.accepted += sum(result.accepted)
            score.verified_again += result.verified_again
        print(f"{index + 1} of {len(cases)} prompts", file=sys.stderr, flush=True)
    yield from (score for _, _, score in ways.values())


def witness(build: Path) -> Callable[[Sequence[int], int], list[int]]:
    """Decode greedily by transformers in fp32, with the packages' weights and the host's embedding table."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from shardmill.gates.stored import WholeModel
    from shardmill.gates.weights import PackageWeights
    from shardmill.models.hf_config import load_hf_config
    from shardmill.plan import load_part

    content = manifest(build)
    parts = [load_part(build / "parts" / f"{part['name']}.json") for part in content["parts"]]
    plan = json.loads((build / "plan.json").read_text())
    whole = WholeModel(
        [PackageWeights(build / "packages" / f"{part.name}.mlpackage", part, plan["prefix"]) for part in parts]
    )
    config = load_hf_config(build / "source")
    config.tie_word_embeddings = False  # the table is fp16, the head INT8
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    known = {
        "model.embed_tokens.weight": load_file(build / content["embedding"]["path"])["embedding"].float()
        / plan["architecture"]["embedding_scale"],  # transformers scales them itself
        "lm_head.weight": torch.cat([block.clone() for block in whole.head()]),  # each is written over the one before
    }
    names = model.state_dict().keys()
    model.load_state_dict({n: known[n] if n in known else whole(n) for n in names}, assign=True)
    model.generation_config.eos_token_id = None

    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        generated = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        tokens: list[int] = generated[0, len(prompt) :].tolist()
        return tokens

    return greedy


def row_differences(engine: Engine, tokens: Sequence[int]) -> dict[str, float]:
    """Return how far apart the logits of the same tokens are, fed singly and in the widest passes."""
    tokens = tokens[: engine.slots]
    single, wide = (fed(engine, tokens, width) for width in (1, engine.widths[-1]))
    apart = np.abs(single[: len(wide)] - wide).max(axis=1)  # [n]
    return {
        "compared": len(apart),
        "different": int((apart > 0).sum()),
        "largest": float(apart.max()),
        "median": float(np.median(apart)),
        "argmax_different": int((single[: len(wide)].argmax(1) != wide.argmax(1)).sum()),
    }


def fed(engine: Engine, tokens: Sequence[int], width: int) -> Any:
    """Return logits [n, V], in passes of `width` from position 0 on."""
    measure_widths(engine, repeats=1)  # an engine's first call of a width may be another than all later ones
    rows = []
    for first in range(0, len(tokens) - width + 1, width):
        at = range(first, first + width)
        rows.append(engine.forward(tokens[first : first + width], at, at))
    return np.concatenate(rows)


def table(scores: Sequence[Score]) -> str:
    """Return the scores as a Markdown table, and under it every difference."""
    columns = ("decoding", "prompts equal", "tokens per pass", "accepted", "run again", "of the tokens")
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for s in scores:
        speed = f"{(s.tokens - s.cases) / s.passes:.2f}" if s.passes else ""
        share = f"{100 * s.accepted / s.drafted:.0f} %" if s.drafted else ""
        equal = f"{s.cases - len(s.differences)} of {s.cases}"
        again = f"{s.verified_again} | {s.verified_again / s.tokens:.1%}" if s.verified_again else " | "
        lines.append(f"{s.name} | {equal} | {speed} | {share} | {again}")
    text = "\n".join(f"| {line} |" for line in lines)
    for s in scores:
        for d in s.differences:
            where = f"{d.task} prompt {d.case} ({d.prompt_tokens} tokens), token {d.at}"
            text += f"\n{s.name}: {where}, top-2 margin {d.margin:.2g}"
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of a built model")
    parser.add_argument("--tasks", type=Path, default=Path("resources/tasks"), help="folder of prompts by task")
    parser.add_argument("--prompts", type=int, default=60, help="most prompts")
    parser.add_argument("--new-tokens", type=int, default=200, help="tokens after each prompt")
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32", help="the portable engine's")
    parser.add_argument("--apart", action="store_true", help="widths round apart")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=tuple(POLICIES))
    parser.add_argument("--no-witness", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--guard-margin", type=float, nargs="*", default=[0.0], help="re-verify rows whose top-2 margin is less"
    )
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--record", type=Path, help="write prompts and tokens here, for lab/drafters.py")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode, compares, prints."""
    args = parse(arguments)
    precision = "fp16" if args.apart else args.precision
    engine, draft = load(args.build, precision, args.apart)
    measure_widths(engine)
    session = Session(engine)
    wanted = prompts(args.build, args.tasks, args.prompts, engine.slots - args.new_tokens)
    cases = [plain(session, task, tokens, args.new_tokens) for task, tokens in wanted]
    if args.record:
        rows = [{"task": c.task, "prompt_tokens": [*c.prompt], "output_tokens": [*c.tokens]} for c in cases]
        args.record.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    scores = [] if args.no_witness else [Score("transformers, fp32")]
    for reference in scores:
        greedy = witness(args.build)
        for index, case in enumerate(cases):
            reference.add(index, case, greedy(case.prompt, len(case.tokens)))
    scores += compare(session, Session(draft), cases, args.drafters, args.policies, args.guard_margin)
    rows_apart = row_differences(engine, [t for case in cases for t in (*case.prompt, *case.tokens)][:ROWS])
    print(f"{len(cases)} prompts of {min(len(c.prompt) for c in cases)} to {max(len(c.prompt) for c in cases)} tokens,")
    print(f"{args.new_tokens} new tokens each, {precision}{', widths apart' if args.apart else ''}; rows: {rows_apart}")
    print(table(scores))
    if args.json:
        report = {"precision": precision, "apart": args.apart, "rows": rows_apart}
        report["scores"] = [asdict(score) for score in scores]
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(precision == "fp32" and any(score.differences for score in scores))


if __name__ == "__main__":
    sys.exit(main())
