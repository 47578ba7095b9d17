"""Sounds in a text, from samples to tokens: a built tower and decoder answer what transformers' `generate` answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import sounds
import tiny
import torch
from kit_runner.figures import relative_error
from media.test_mel import TORCH

from shardmill.errors import ShardmillError
from shardmill.gates.disturbed import disturbed, longest_sum
from shardmill.machine import load_programs_as
from shardmill.media.mel import log_mel
from shardmill.media.sound_rules import Window, read_sound_rules, windows
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place
from shardmill.runtime.tower import rows_of

from .test_images import COUNT, FP32, NOISE, SEEDS, Asked, demand_the_answer, demand_the_logits, numbers

pytestmark = [FP32, pytest.mark.thorough]
CLIPS = [3.97, 0.6]  # seconds: a whole window and one whose last chunk is cut; and less than a chunk


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("sounds")
    source = tiny.fetched(sounds.write_hearing(folder / "checkpoint"), folder / "source")
    options: dict[str, Any] = {"context": 160, "topology": "auto", "head": {"slices": 1}}
    parts, plan = tiny.split(source, audio={"frames": sounds.FRAMES}, **options)
    programs = {name: part for name, part in parts.items() if part.kind != "embedding"}
    packages = {n: tiny.convert(part, source, folder / f"{n}.mlpackage", "fp16") for n, part in programs.items()}
    table = tiny.write_table(parts["embedding"], source, folder / "embedding.safetensors")
    with load_programs_as("fp32"):
        engine = Engine(in_place(plan, packages, table), Path("/"))
    yield answered(engine, sounds.hearing(), plan)


def heard(plan: dict[str, Any]) -> list[Sequence[Window]]:
    rules = read_sound_rules({key: value for key, value in plan["audio"].items() if key != "most"})
    return [windows(rules, sounds.clip(seconds, seed)) for seed, seconds in enumerate(CLIPS)]


def answered(engine: Engine, model: Any, plan: dict[str, Any]) -> Asked:
    """Asks transformers, with the same frames."""
    assert engine.tower is not None
    prompt, ids, flat = [5, 9, 7], [5, 9, 7], list[Window]()
    for clip, cut in enumerate(heard(plan)):
        for window in cut:
            count = rows_of(plan["tower"], window.grid)[1]
            engine.show(numbers(len(flat), count), window.columns, window.grid)
            prompt += numbers(len(flat), count)
            ids += [sounds.MARK] * count
            flat.append(window)
        prompt.append(3 + clip)
        ids.append(3 + clip)
    prompt, ids = [*prompt, 8, 2, 6], [*ids, 8, 2, 6]
    frames = [np.concatenate([each.columns for each in cut], axis=1) for cut in heard(plan)]
    given = sounds.given(frames) | {"input_ids": torch.tensor([ids])}
    with torch.no_grad():
        tokens = model.generate(**given, max_new_tokens=COUNT, do_sample=False)[0, len(ids) :].tolist()
        whole = {**given, "input_ids": torch.tensor([ids + tokens])}
        logits = model(**whole).logits[0].numpy()
        with disturbed(model, NOISE):
            moved = relative_error(model(**whole).logits[0].numpy(), logits)
    within = limits.moved(moved * limits.UNITS["fp32"] / NOISE, longest_sum(model))
    return Asked(engine, flat, prompt, tokens, logits, within)  # type: ignore[arg-type]  # windows for views


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_is_transformers_with_rejected_drafts(asked: Asked, seed: int) -> None:
    demand_the_answer(asked, seed)


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_logits_are_transformers_wherever_passes_cut_a_sound(asked: Asked, cut: int) -> None:
    demand_the_logits(asked, cut)


def test_another_sound_gives_another_answer(asked: Asked) -> None:
    """Otherwise the equalities above would say nothing of sounds."""
    asked.engine.reset()
    window = asked.views[0]
    count = sum(1000 <= token < 2000 for token in asked.prompt)
    other = [500_000 + i for i in range(count)]
    asked.engine.show(other, -window.columns, window.grid)
    swapped = dict(zip(numbers(0, count), other, strict=True))
    text = [swapped.get(token, token) for token in asked.prompt]
    logits = [asked.engine.forward([token], [i], [i])[0] for i, token in enumerate(text)]
    asked.engine.release(other)
    assert relative_error(logits[-1][None], asked.logits[len(text) - 1][None]) > 1e-2


def test_every_program_gives_a_window_the_same_rows(asked: Asked) -> None:
    tower = asked.engine.tower
    assert tower is not None and sorted(tower.programs) == [13, 39]
    frames = asked.views[-1].columns
    short, long = (tower.rows(frames, (1, frames.shape[1]), bucket) for bucket in (13, 39))
    assert len(short) == rows_of(tower.rules, (1, frames.shape[1]))[1]
    depth, longest = sounds.AUDIO["encoder_layers"], sounds.AUDIO["encoder_ffn_dim"]
    limits.numbers_agree("rows of a larger program", long, short, limits.model(depth, longest))


def test_a_window_that_no_program_takes_is_refused(asked: Asked) -> None:
    tower = asked.engine.tower
    assert tower is not None
    with pytest.raises(ShardmillError, match=r"a window of 301 frames: the largest program takes 39"):
        tower.rows(np.zeros((sounds.BINS, 301), np.float32), (1, 301))


def test_the_frames_are_transformers(asked: Asked) -> None:
    """Of a whole sound, cut into windows afterwards; within what its extractor's single precision allows."""
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    assert asked.engine.tower is not None
    content = dict(asked.engine.manifest["audio"])
    content.pop("most")
    rules = read_sound_rules(content)
    extractor = Qwen3ASRFeatureExtractor(feature_size=sounds.BINS)
    for seconds in CLIPS:
        samples = sounds.clip(seconds)
        made = extractor(samples, sampling_rate=16000, padding=True, return_attention_mask=True, return_tensors="np")
        count = int(made["attention_mask"].sum())
        ours = np.concatenate([each.columns for each in windows(rules, samples)], axis=1)
        assert ours.shape[1] == count and np.array_equal(ours, log_mel(rules.mel, samples))
        limits.numbers_agree("frames", ours, made["input_features"][0, :, :count], TORCH, size=1)
