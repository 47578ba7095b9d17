"""Where a model pays for INT8: in its LM head, in its layers, or in both?

    python benchmarks/int8_cost.py checkpoints/gemma-3-270m wikitext-2/test.txt [--windows 3] [--tokens 513]

transformers runs the checkpoint in fp32 on windows of a text, once as it is and once with matrices as a package would
hold them: in INT8 with one scale per row, or in fp16. Nothing else is rounded, and no program is built. Windows do not
overlap and each begins as the tokenizer begins a text. For each choice it prints the share of clear positions (those at
which the two best tokens are 0.1 nat or more apart) that keep their most likely token, and the mean KL divergence over
all positions. The whole model is in memory in fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardmill.convert.palette import to_fp16, to_int8
from shardmill.gates.stack import CLEAR_MARGIN, DistributionComparison, compare_distributions

ROWS = 64  # positions whose logits are held at a time
CHOICES = {  # what is told: precision of the LM head and of the layers
    "LM head in INT8": ("int8", "fp32"),
    "layers in INT8": ("fp32", "int8"),
    "both in INT8": ("int8", "int8"),
    "both in fp16": ("fp16", "fp16"),
}


def rounded(precision: str, weight: Tensor) -> Tensor:
    """Return a matrix [out, in] as a package in that precision gives it back, in fp32."""
    if precision == "int8":
        levels, scale, _ = to_int8(weight)
        return levels.float() * scale.float()[:, None]
    return to_fp16(weight)[0].float() if precision == "fp16" else weight


def windows(checkpoint: Path, text: Path, count: int, size: int) -> list[list[int]]:
    """Return the first tokens of a text in windows of `size`, each with the tokenizer's opening."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    opening: list[int] = tokenizer.encode("").ids
    tokens: list[int] = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    room = size - len(opening)
    return [[*opening, *tokens[start : start + room]] for start in range(0, count * room, room)]


def load(checkpoint: Path) -> Any:
    """Return transformers' model in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def hidden(checkpoint: Path, precision: str, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the LM head's inputs [n, d] with the layers' matrices in a precision."""
    model = load(checkpoint)
    for parameter in model.model.layers.parameters():
        if parameter.dim() == 2:
            parameter.copy_(rounded(precision, parameter))
    return torch.cat(
        [model.model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0] for tokens in texts]
    )


@torch.no_grad()
def compare(
    states: dict[str, Tensor], heads: dict[str, Tensor], following: Tensor
) -> Iterator[tuple[str, DistributionComparison]]:
    """Yield each choice against the checkpoint in fp32, ROWS positions at a time."""
    for first in range(0, len(following), ROWS):
        some = slice(first, first + ROWS)
        original = states["fp32"][some] @ heads["fp32"].T
        for choice, (head, layers) in CHOICES.items():
            yield choice, compare_distributions(original, states[layers][some] @ heads[head].T, following[some])


def report(found: dict[str, list[DistributionComparison]]) -> Table:
    """Return a line for each choice."""
    table = Table("", "same most likely token, of clear positions", "share", "mean KL divergence, nat")
    for choice, blocks in found.items():
        clear = torch.cat([block.margin for block in blocks]) >= CLEAR_MARGIN
        agree = torch.cat([block.agree for block in blocks])[clear]
        divergence = float(torch.cat([block.divergence for block in blocks]).mean())
        share = 100 * float(agree.float().mean())
        table.add_row(choice, f"{int(agree.sum())} of {len(agree)}", f"{share:.1f} %", f"{divergence:.2g}")
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("text", type=Path, help="UTF-8 text")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=513, help="of each window; the last of them is only predicted")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    options = parse(arguments)
    texts = windows(options.checkpoint, options.text, options.windows, options.tokens)
    following = torch.tensor([tokens[1:] for tokens in texts]).flatten()
    fed = [tokens[:-1] for tokens in texts]
    states = {precision: hidden(options.checkpoint, precision, fed) for precision in ("fp32", "int8", "fp16")}
    table = load(options.checkpoint).lm_head.weight.detach()
    heads = {precision: rounded(precision, table) for precision in ("fp32", "int8", "fp16")}
    found: dict[str, list[DistributionComparison]] = {choice: [] for choice in CHOICES}
    for choice, block in compare(states, heads, following):
        found[choice].append(block)
    Console(width=100).print(report(found))


if __name__ == "__main__":
    main()
