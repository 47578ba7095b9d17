"""`shardmill draft train`: an EAGLE-3 head of a build's own, fitted to what its model computes for a text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.commands.arguments import Build
from shardmill.errors import ShardmillError
from shardmill.files import digest, parse_json, read_json, read_named
from shardmill.imports import needing_lab

HELD = 10  # one text in ten is held out, from the end of the file
TEXTS, PROMPT = 16, 64  # the most held-out texts that are measured, and the tokens of plain text that begin one
PACKAGES = ("numpy", "safetensors", "tokenizers", "torch", "transformers")

app = typer.Typer(help="Train a drafter for a model.", no_args_is_help=True)


@app.callback()
def draft() -> None:
    """Train a drafter for a model."""


@app.command()
def train(
    build: Build,
    text: Annotated[
        Path,
        typer.Option(
            help="UTF-8 text of the kind that the model will write, or prompts (.jsonl); its end is held out."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the head; by default drafters/MODEL.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training, each on 8 texts of up to 256 tokens.")] = 1000,
) -> None:
    """Train an EAGLE-3 head for a model, on the CPU. A run that was interrupted goes on where it was."""
    plan, source, content = read_json(build / "plan.json"), build / "source", read_named(text)
    if plan["buckets"]:
        raise ShardmillError(f"{build} holds an encoder, which writes no text: there is nothing to draft")
    if not (source / "config.json").is_file():
        raise ShardmillError(f"{build}: holds no checkpoint; train in the folder in which the model was built")
    prompts, held_out = _divided(source, content, text)

    with needing_lab():
        from shardmill_lab.draft.states import multiplies_bf16  # only now: torch takes long to import
        from shardmill_lab.draft.train import Run, train_head
    from shardmill.machine import package_versions
    from shardmill.pipeline.cache.store import TRAINING, Store
    from shardmill.pipeline.code_digest import code_digest
    from shardmill.pipeline.task import Action

    packages = package_versions(PACKAGES)
    inputs, bf16 = {"source": plan["source"], "texts": digest(prompts)}, {"bf16": multiplies_bf16()}
    code = code_digest(("shardmill_lab.draft.train",))
    written = Action("draft texts", inputs, bf16, code, packages)
    action = Action("draft", {**inputs, "held": digest(held_out)}, {"steps": steps, **bf16}, code, packages)
    folder, store = out or Path("drafters") / plan["model"], Store(build.resolve().parent / ".store")
    progress, texts = (store.root / TRAINING / each.key for each in (action, written))
    run = Run(progress, texts, steps, lambda line: typer.echo(line, err=True))

    def work(made: Mapping[str, Path]) -> None:
        train_head(source, plan, prompts, held_out, run, made["head"])

    store.perform(action, {"head": folder}, folder.with_name(f"{folder.name}.receipt.json"), work)
    shutil.rmtree(progress, ignore_errors=True)
    _tell(folder)


def _divided(source: Path, content: str, text: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the texts to learn from, and the beginnings of held-out ones, which the model continues.

    Raises ShardmillError for a file with too few texts.
    """
    with needing_lab():
        from shardmill_lab.draft.windows import WINDOW, windows_of

    if text.suffix == ".jsonl":
        texts, most = encoded_prompts(source, text, WINDOW // 2), WINDOW
    else:
        texts, most = windows_of(read_tokenizer(source / "tokenizer.json").encode(content).ids), PROMPT
    if len(texts) < HELD:
        raise ShardmillError(f"{text}: gives {len(texts)} texts of up to {WINDOW} tokens; give at least {HELD}")
    count = len(texts) // HELD
    return texts[:-count], [one[:most] for one in texts[-count:][:TEXTS]]


def encoded_prompts(source: Path, file: Path, most: int) -> list[list[int]]:
    """Return prompts of a file in JSON Lines, in a checkpoint's chat template; none over `most` tokens.

    Raises ShardmillError for a line without a prompt, and if the template refuses one.
    """
    from transformers import AutoTokenizer

    from shardmill.templates.render import rendered

    tokenizer, prompts = AutoTokenizer.from_pretrained(source, trust_remote_code=False), list[list[int]]()
    lines = read_named(file).removesuffix("\n").split("\n")  # a string in JSON may hold other ends of lines
    for number, line in enumerate(lines, 1):
        try:
            prompt = parse_json(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise ShardmillError(f'{file}, line {number}: must be {{"prompt": "..."}}')
        fine, said = rendered(tokenizer, [{"role": "user", "content": prompt}], None)
        if not fine:
            raise ShardmillError(f"{file}, line {number}: the chat template refuses it: {said}")
        prompts.append(tokenizer.encode(said, add_special_tokens=False))
    return [one for one in prompts if len(one) <= most]


def _tell(folder: Path) -> None:
    """Print what a head reached on the held-out text, and what to do with it."""
    from shardmill_lab.draft.train import REPORT

    reached = read_json(folder / REPORT)["held_out"]
    passes = ", ".join(f"{value:.2f} at {cap} drafts" for cap, value in reached["tokens_per_pass"].items())
    typer.echo(f"tokens per pass in {reached['tokens']} tokens of the model's own: {passes}")
    typer.echo(f"{folder}: name it in the config, `drafter: {json.dumps({'path': str(folder)})}`, and build again")
