"""Is it worth verifying 7 drafts in a pass instead of 3? Replays recorded outputs at both, and weighs them by a cost.

    python benchmarks/verify_widths.py [RECORDED.jsonl] [--json OUT.json]

The replay is that of benchmarks/drafters.py: a pass yields the drafts that the recorded output confirms, and one token
more; "cold" is each request alone, "warm" the requests after the first --warm ones, with what was learned from them.
Every pass drafts all it may, so these are upper bounds.

What a pass costs was not measured by this project: by default --milliseconds are those that ANEMLL Forge publishes for
passes of 4 and of 8 tokens (docs/verifier_len.md: an M6, Qwen3.8-27B through Core AI, 8k tokens of context). It prints
tokens per second by that cost, which leaves out the passes' other work, and how much more a pass of 8 may cost than one
of 4 before it loses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from drafters import LOOKUP, PromptLookup, Recorded, read_requests, replay, taught

from shardmill.decode.drafters import BY_ITSELF, Drafter, create_drafter

WIDTHS = (4, 8)
PUBLISHED = (95.3, 91.5)  # ms


@dataclass(frozen=True)
class Row:
    """One drafter: tokens per pass by the widths, before and after it has learned."""

    drafter: str
    cold: tuple[float, ...]
    warm: tuple[float, ...]


def measured(name: str, requests: Sequence[Recorded], warm: int) -> Row:
    """Replay all requests at each width."""
    found = [at_width(name, requests, warm, width) for width in WIDTHS]
    return Row(name, tuple(cold for cold, _ in found), tuple(later for _, later in found))


def at_width(name: str, requests: Sequence[Recorded], warm: int, width: int) -> tuple[float, float]:
    """Return tokens per pass of a width, each request alone, and after some have been learned from."""
    most = width - 1
    cold = replay(partial(fresh, name, most), requests, most)
    drafter, _ = taught(name, requests[:warm], most)
    return cold.tokens_per_pass, replay(lambda: drafter, requests[warm:], most).tokens_per_pass


def fresh(name: str, most: int) -> Drafter:
    """Return a drafter that knows nothing yet."""
    return PromptLookup(most) if name == LOOKUP else create_drafter(name)


def table(rows: Sequence[Row], costs: Sequence[float]) -> str:
    """Return the figures as a Markdown table."""
    head = ["drafter, requests", *(f"tokens per pass of {w}" for w in WIDTHS), *(f"tok/s at {w}" for w in WIDTHS)]
    lines = [" | ".join([*head, "a pass of 8 may cost"]), " | ".join("---" for _ in range(len(head) + 1))]
    for row in rows:
        for when in ("cold", "warm"):
            found = getattr(row, when)
            speeds = [1e3 * tokens / cost for tokens, cost in zip(found, costs, strict=True)]
            cells = [f"{tokens:.3f}" for tokens in found] + [f"{speed:.1f}" for speed in speeds]
            lines.append(" | ".join([f"{row.drafter}, {when}", *cells, f"{found[1] / found[0]:.3f} times"]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=Path("../shared/data/recorded_outputs.jsonl"))
    parser.add_argument("--warm", type=int, default=100, help="requests learned from before the warm ones")
    parser.add_argument("--milliseconds", type=float, nargs=2, default=PUBLISHED, help="of passes of 4 and of 8 tokens")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    requests = read_requests(args.data)
    if len(requests) <= args.warm:
        raise SystemExit(f"{args.data} holds {len(requests)} requests: --warm must be less than that")
    rows = [measured(name, requests, args.warm) for name in (LOOKUP, *BY_ITSELF)]
    print(f"{len(requests)} requests; passes of {WIDTHS[0]} and {WIDTHS[1]} tokens in {args.milliseconds} ms")
    print(table(rows, args.milliseconds))
    if args.json:
        report = {"widths": WIDTHS, "milliseconds": args.milliseconds, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
