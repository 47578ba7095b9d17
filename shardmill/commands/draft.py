"""`shardmill draft train`: an EAGLE-3 head of a build's own, fitted to what its model computes for a text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.commands.arguments import Build, read_prompt_file
from shardmill.errors import ShardmillError
from shardmill.files import read_json

if TYPE_CHECKING:
    from shardmill.draft.train import Run

HELD = 10  # one window in ten is held out, from the end of the text
PACKAGES = ("numpy", "safetensors", "tokenizers", "torch", "transformers")
TRAINING = "training.json"

app = typer.Typer(help="Train a drafter for a model.", no_args_is_help=True)


@app.callback()
def draft() -> None:
    """Train a drafter for a model."""


@app.command()
def train(
    build: Build,
    text: Annotated[Path, typer.Option(help="UTF-8 text of the kind that the model will write; its end is held out.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the head; by default drafters/MODEL.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training, each on 2,048 tokens.")] = 1000,
) -> None:
    """Train an EAGLE-3 head for a model, on the CPU. A run that was interrupted goes on where it was."""
    from shardmill.checkpoint.hashing import hash_file
    from shardmill.draft.train import Run
    from shardmill.machine import package_versions
    from shardmill.pipeline.cache.store import Store
    from shardmill.pipeline.code_digest import code_digest
    from shardmill.pipeline.task import Action

    plan, source, content = read_json(build / "plan.json"), build / "source", read_prompt_file(text)
    if plan["buckets"]:
        raise ShardmillError(f"{build} holds an encoder, which writes no text: there is nothing to draft")
    if not (source / "config.json").is_file():
        raise ShardmillError(f"{build}: holds no checkpoint; train in the folder in which the model was built")
    windows = _windows(source, content, text)
    action = Action(
        "draft",
        {"source": plan["source"], "text": hash_file(text)},
        {"steps": steps},
        code_digest(("shardmill.draft.train", "shardmill.draft.measure")),
        package_versions(PACKAGES),
    )
    folder, store = out or Path("drafters") / plan["model"], Store(build.resolve().parent / ".store")
    run = Run(store.root / "training" / action.key, steps, lambda line: typer.echo(line, err=True))

    def work(made: Mapping[str, Path]) -> None:
        _train(source, plan, windows, run, made["head"])

    store.perform(action, {"head": folder}, folder.with_name(f"{folder.name}.receipt.json"), work)
    shutil.rmtree(run.folder, ignore_errors=True)
    _tell(folder)


def _windows(source: Path, content: str, text: Path) -> Any:
    """Return the text in windows, [windows, n]. Raises ShardmillError for a text that is too short to hold any out."""
    from shardmill.draft.states import WINDOW, windows_of

    found = windows_of(read_tokenizer(source / "tokenizer.json").encode(content).ids)
    if len(found) < HELD:
        raise ShardmillError(f"{text}: fills {len(found)} windows of {WINDOW} tokens; give at least {HELD}")
    return found


def _train(source: Path, plan: Mapping[str, Any], windows: Any, run: Run, out: Path) -> None:
    """Train a head, measure it on held-out text, and write both."""
    from shardmill.draft import measure, states
    from shardmill.draft.train import drafted_rows, head_config, new_head, trained, write_head
    from shardmill.files import write_json
    from shardmill.imports import quiet_transformers
    from shardmill.models.eagle3 import default_taps

    with quiet_transformers():
        model, graph = states.load_reference(source), plan["architecture"]["graph"]
    config, layers = model.config.get_text_config(), plan["architecture"]["layers"]
    held = max(1, len(windows) // HELD)
    seen = states.kept_windows(run.folder, model, windows[:-held], default_taps(layers), run.say)
    rows = drafted_rows(seen.tokens, config.vocab_size)
    scale = plan["architecture"]["embedding_scale"] / graph["stream_scale"]
    table, lm_head = model.get_input_embeddings().weight * scale, model.get_output_embeddings().weight[rows]
    head = trained(new_head(head_config(config, len(rows)), lm_head), seen, table, lm_head, run).eval()
    found = measure.measure_acceptance(head, model, windows[-held:], default_taps(layers), table, rows)
    write_head(out, head, rows, config.vocab_size)
    write_json(out / TRAINING, {"steps": run.steps, "text_tokens": seen.tokens.numel(), "held_out": found.plain()})


def _tell(folder: Path) -> None:
    """Print what a head reached on the held-out text, and what to do with it."""
    found = read_json(folder / TRAINING)["held_out"]
    passes = ", ".join(f"{value:.2f} at {cap} drafts" for cap, value in found["tokens_per_pass"].items())
    typer.echo(f"tokens per pass in {found['tokens']} tokens of the model's own: {passes}")
    typer.echo(f"{folder}: name it in the config, `drafter: {json.dumps({'path': str(folder)})}`, and build again")
