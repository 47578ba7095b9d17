"""Loads a build folder for serving or for a conversation."""

from __future__ import annotations

from pathlib import Path

from shardmill.decode import ContextPolicy, Session, choose_layout
from shardmill.files import digest
from shardmill.runtime import load
from shardmill.runtime.manifest import read_manifest, verify_width
from shardmill.serve.model import Model
from shardmill.serve.template import load_template, turn_end


def load_model(
    build: Path,
    draft_build: Path | None,
    precision: str,
    context_policy: ContextPolicy = "stop",
    chat_template: Path | None = None,
) -> Model:
    """Load a built model, and its draft model if it has one.

    Args:
        build: folder of a finished build.
        draft_build: the draft model's build folder.
        precision: the portable engine's precision, "fp32" or "fp16"; ignored on Core ML.
        context_policy: what happens when the context is full, also for the draft model.
        chat_template: a file with a chat template to use instead of the checkpoint's.

    Raises:
        DecodeError: the context is too small to slide.
        ShardmillError: a folder is not a finished build, or a file in it can't be loaded.
    """
    manifest = read_manifest(build)
    choose_layout(context_policy, manifest["context"], verify_width(manifest))
    tokenizer = load.load_tokenizer(build, manifest)
    template = load_template((build / manifest["tokenizer"]["path"]).parent, chat_template)
    end = turn_end(template, tokenizer) if template else None
    engine = load.load_engine(build, precision)
    ends = tuple(dict.fromkeys(manifest["eos_token_ids"]))
    return Model(
        name=manifest["model"],
        tokenizer=tokenizer,
        template=template,
        engine=engine,
        engine_name=load.engine_name(),
        eos=ends if end is None or end in ends else (*ends, end),
        draft_session=Session(load.load_engine(draft_build, precision), context_policy=context_policy)
        if draft_build
        else None,
        fingerprint=digest(manifest),
        tokenizer_digest=manifest["tokenizer"].get("sha256", ""),
        threads=getattr(engine, "threads", None),
    )
