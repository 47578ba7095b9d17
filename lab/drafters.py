"""Replays recorded LLM outputs through each drafter and through transformers' prompt lookup.

    python lab/drafters.py [RECORDED.jsonl] [--json OUT.json] [--check]

Each line of the input holds a "prompt" and an "output" as text, tokenised with mistral-common's Tekken
tokenizer, or "prompt_tokens" and "output_tokens" as they are. A pass verifies at most --drafts tokens,
and yields those that the recorded output confirms and one more. "cold" is each request alone, "warm" the
requests after the first --warm ones, with what was learned from exactly those. Replay is an upper bound
for live decoding only where the model's output does not change with the width of a pass; it says nothing
about the cost of a pass.

Times are CPU time of proposing and observing per emitted token, the best of --repeats replays; indexing
the prompt is listed apart, as it happens once and beside the prefill.
"""

import argparse
import json
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drafted_decoding.drafters import BY_ITSELF, PLAIN, Draft, Drafter, RequestInfo, create_drafter

from shardmill.bench.prompts import replay_output

LOOKUP = "prompt lookup"
BARS = {"cold": 1.03, "warm": 1.12, "microseconds": 50.0}


@dataclass(frozen=True)
class Recorded:
    """A request: its prompt, and the output to be replayed."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True)
class Replay:
    """Sums over replayed requests; seconds are CPU time."""

    tokens: int
    passes: int
    seconds: float
    index_seconds: float
    index_tokens: int

    @property
    def tokens_per_pass(self) -> float:
        """Return emitted tokens per pass."""
        return self.tokens / self.passes

    @property
    def microseconds(self) -> float:
        """Return drafter time per emitted token."""
        return self.seconds / self.tokens * 1e6


@dataclass(frozen=True)
class Row:
    """One drafter's figures."""

    drafter: str
    cold: float
    warm: float
    cold_ratio: float
    warm_ratio: float
    microseconds: float
    microseconds_long: float
    index_microseconds: float
    megabytes: float


class PromptLookup:
    """transformers' PromptLookupCandidateGenerator, with its default of matching two tokens, as a drafter."""

    name = LOOKUP

    def __init__(self, drafts: int) -> None:
        import torch
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        torch.set_num_threads(1)
        self._torch = torch
        self._generator: Any = PromptLookupCandidateGenerator(num_output_tokens=drafts, max_length=1 << 30)
        self._ids = torch.empty((1, 0), dtype=torch.long)

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""
        self._ids = self._torch.tensor([list(prompt)])

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        candidates, _ = self._generator.get_candidates(self._ids)
        return Draft(tuple(candidates[0, self._ids.shape[1] :][:limit].tolist()))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""
        self._ids = self._torch.cat((self._ids, self._torch.tensor([list(emitted)])), dim=1)

    def finish(self) -> None:
        """See `Drafter`."""


def read_requests(path: Path) -> list[Recorded]:
    """Return the recorded requests, tokenised; those too short to decode are left out."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: give the path of a file of recorded outputs (JSON lines)")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    encode = None if all("output_tokens" in row for row in rows) else tekken()
    requests = [
        Recorded(row["prompt_tokens"], row["output_tokens"])
        if encode is None
        else Recorded(encode(row["prompt"], bos=True, eos=False), encode(row["output"], bos=False, eos=True))
        for row in rows
    ]
    return [r for r in requests if r.prompt and len(r.output) > 1]


def tekken() -> Callable[..., list[int]]:
    """Return `encode` of the newest Tekken tokenizer that mistral-common carries."""
    try:
        import mistral_common
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    except ImportError:
        raise SystemExit("texts need a tokenizer: pip install mistral-common") from None
    files = sorted((Path(mistral_common.__file__).parent / "data").glob("tekken_*.json"))
    encode: Callable[..., list[int]] = Tekkenizer.from_file(files[-1]).encode
    return encode


def replay(make: Callable[[], Drafter], requests: Sequence[Recorded], drafts: int, *, learn: bool = False) -> Replay:
    """Replay `requests`; `make` gives the drafter for each, `learn` tells it when a request is finished."""
    tokens = passes = index_tokens = 0
    seconds = index_seconds = 0.0
    for request in requests:
        drafter = make()
        start = time.thread_time()
        drafter.reset(request.prompt)
        indexed = time.thread_time()
        passes += replay_one(drafter, request, drafts)
        if learn:
            drafter.finish()
        seconds += time.thread_time() - indexed
        index_seconds += indexed - start
        index_tokens += len(request.prompt)
        tokens += len(request.output) - 1
    return Replay(tokens, passes, seconds, index_seconds, index_tokens)


def best_of(repeats: int, once: Callable[[], Replay]) -> Replay:
    """Return the first of several replays, with the least time that any of them took.

    A drafter that judges its own proposals may draft better the second time; only the first replay's
    tokens count.
    """
    runs = [once() for _ in range(max(1, repeats))]
    return replace(runs[0], seconds=min(r.seconds for r in runs), index_seconds=min(r.index_seconds for r in runs))


def replay_one(drafter: Drafter, request: Recorded, drafts: int) -> int:
    """Return the passes that the output takes after its first token, which the prefill gives."""
    return len(replay_output(drafter, request.prompt, request.output, drafts).accepted)


def long_requests(requests: Sequence[Recorded], warm: int, length: int) -> list[Recorded]:
    """Return a few outputs, each after a prompt of `length` tokens made of other requests."""
    text = [t for r in requests[:warm] for t in (*r.prompt, *r.output)]
    repeats = -(-length // max(1, len(text)))
    return [Recorded((text * repeats)[:length], r.output) for r in requests[warm : warm + 5]]


def taught(name: str, requests: Sequence[Recorded], drafts: int) -> tuple[Drafter, Replay]:
    """Return a drafter after `requests`, and what the requests took."""
    drafter: Drafter = PromptLookup(drafts) if name == LOOKUP else create_drafter(name)
    return drafter, replay(lambda: drafter, requests, drafts, learn=True)


def megabytes(name: str, requests: Sequence[Recorded], prompt: Sequence[int], drafts: int) -> float:
    """Return the memory in MB of a drafter after `requests`, with `prompt` indexed."""
    if name == LOOKUP:
        return len(prompt) * 8 / 1e6
    tracemalloc.start()
    try:
        drafter, _ = taught(name, requests, drafts)
        drafter.reset(prompt)
        return tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()


def measure(name: str, requests: Sequence[Recorded], args: argparse.Namespace, base: Row | None) -> Row:
    """Return all figures of one drafter; ratios are to `base`, the prompt lookup's."""
    early, late = requests[: args.warm], requests[args.warm :]
    fresh: Callable[[], Drafter] = (
        (lambda: PromptLookup(args.drafts)) if name == LOOKUP else (lambda: create_drafter(name))
    )
    cold = replay(fresh, requests, args.drafts)
    drafter, _ = taught(name, early, args.drafts)
    warm = best_of(args.repeats, lambda: replay(lambda: drafter, late, args.drafts))
    far = long_requests(requests, args.warm, args.context)
    distant = best_of(args.repeats, lambda: replay(lambda: drafter, far, args.drafts))
    return Row(
        drafter=name,
        cold=cold.tokens_per_pass,
        warm=warm.tokens_per_pass,
        cold_ratio=cold.tokens_per_pass / (base.cold if base else cold.tokens_per_pass),
        warm_ratio=warm.tokens_per_pass / (base.warm if base else warm.tokens_per_pass),
        microseconds=warm.microseconds,
        microseconds_long=distant.microseconds,
        index_microseconds=distant.index_seconds / distant.index_tokens * 1e6,
        megabytes=megabytes(name, early, far[0].prompt, args.drafts),
    )


def table(rows: Sequence[Row], context: int) -> str:
    """Return the figures as a Markdown table."""
    head = ["drafter", "cold tok/pass", "x lookup", "warm tok/pass", "x lookup", "us/token"]
    head += [f"us/token at {context}", "us/prompt token", "MB"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for r in rows:
        cells = [r.drafter, f"{r.cold:.3f}", f"{r.cold_ratio:.3f}", f"{r.warm:.3f}", f"{r.warm_ratio:.3f}"]
        cells += [f"{v:.1f}" for v in (r.microseconds, r.microseconds_long, r.index_microseconds, r.megabytes)]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def verdicts(rows: Sequence[Row]) -> dict[str, tuple[float, bool]]:
    """Return for each bar the figure that counts, and whether it clears the bar."""
    ours = [r for r in rows if r.drafter != LOOKUP]
    slowest = max(max(r.microseconds, r.microseconds_long) for r in ours)
    cold, warm = max(r.cold_ratio for r in ours), max(r.warm_ratio for r in ours)
    return {
        "cold": (cold, cold >= BARS["cold"]),
        "warm": (warm, warm >= BARS["warm"]),
        "microseconds": (slowest, slowest <= BARS["microseconds"]),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "data", nargs="?", type=Path, default=Path("../shared/data/recorded_outputs.jsonl"), help="recorded outputs"
    )
    parser.add_argument("--drafts", type=int, default=3, help="most drafts per pass")
    parser.add_argument("--warm", type=int, default=100, help="requests learned from before the warm ones")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--repeats", type=int, default=3, help="replays that a time is the best of")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, prints, writes."""
    args = parse(arguments)
    requests = read_requests(args.data)
    if len(requests) <= args.warm:
        raise SystemExit(f"{args.data} holds {len(requests)} requests: --warm must be less than that")
    base = measure(LOOKUP, requests, args, None)
    rows = [base]
    for name in BY_ITSELF:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows.append(measure(name, requests, args, base))
    print(table(rows, args.context))
    for bar, (figure, cleared) in (bars := verdicts(rows)).items():
        print(f"{bar}: {figure:.3f}, bar {BARS[bar]}: {'cleared' if cleared else 'MISSED'}")
    if args.json:
        report = {
            "requests": len(requests),
            "output_tokens": sum(len(r.output) for r in requests),
            "settings": {"drafts": args.drafts, "warm": args.warm, "context": args.context},
            "python": platform.python_version(),
            "rows": [asdict(r) for r in rows],
            "bars": {k: {"figure": v, "bar": BARS[k], "cleared": ok} for k, (v, ok) in bars.items()},
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(args.check and not all(ok for _, ok in bars.values()))


if __name__ == "__main__":
    sys.exit(main())
