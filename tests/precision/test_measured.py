"""A set of forms costs what transformers says of the whole model with these weights in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev

import limits
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from shardmill.forms.form import form, matrices
from shardmill.gates import stored
from shardmill.plan import Part
from shardmill.precision import measured as module
from shardmill.precision.measured import measured_forms, write_original
from shardmill.precision.part_codes import FormWeights, rounded, write_part_codes
from shardmill.precision.part_costs import as_stored

from .cases import Case, in_memory, write_case

OTHERS = ("fp16", "palette4", "palette6/16")
FORMS = ("int4", "int8", *OTHERS)
MODEL = limits.model(3, 128)


def chosen(case: Case) -> dict[str, str]:
    """The forms in turn; the head has the second."""
    paths = [path for part in case.parts for path in matrices(part.shapes)]
    return {path: FORMS[(i - len(paths) + 2) % len(FORMS)] for i, path in enumerate(paths)}


@pytest.fixture(scope="module")
def codes(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of codes by the names of parts."""
    folder = tmp_path_factory.mktemp("codes")
    files = {part.name: folder / f"{part.name}.safetensors" for part in case.parts}
    for part in case.parts:
        write_part_codes(part, case.source, case.model, case.edges, files[part.name], OTHERS)
    return files


def values(weight: Tensor, name: str, file: Path, path: str) -> Tensor:
    """A matrix in a form, made from its codes by hand."""
    if name == "fp16":
        return weight.half().float()
    if name == "int8":
        return rounded(weight).values
    with safe_open(file, framework="pt") as held:
        found = held.get_tensor(f"{path}.{name}.codes")
        if form(name).kind == "int":
            return found.float() * held.get_tensor(f"{path}.{name}.scale").float()[:, None]
        tables = held.get_tensor(f"{path}.{name}.lut").float()
    rows = len(found) // len(tables)
    return torch.stack([tables[i // rows][row.long()] for i, row in enumerate(found)])


def replaced(case: Case, forms: Mapping[str, str], codes: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """What each matrix adds to the checkpoint's tensors, of which several may share one."""
    for part in case.parts:
        for m in case.matrices(part):
            new = values(m.weight, forms[m.path], codes[part.name], m.path)
            if part.kind == "head":
                yield "lm_head.weight", new - m.weight
                continue
            for name, value in as_stored(m.blocks, new, case.source).items():
                yield name, value - case.model.weights(name).float()


def held(case: Case, forms: Mapping[str, str], codes: Mapping[str, Path]) -> list[FormWeights]:
    return [FormWeights(part, case.source, codes[part.name], forms, case.prefix) for part in case.parts]


@pytest.mark.thorough(but=["phi3"])
def test_a_mixed_set_costs_what_transformers_says(
    case: Case, codes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's rows come in several blocks."""
    monkeypatch.setattr(module, "ROWS", 40)
    monkeypatch.setattr(stored, "rows_at_once", lambda columns: 24)
    forms = chosen(case)
    assert {*forms.values()} == {*FORMS}
    write_original(case.model, case.texts, tmp_path / "original.safetensors")
    found = measured_forms(case.model, tmp_path / "original.safetensors", held(case, forms, codes))

    model, text = in_memory(case), torch.tensor(case.texts)
    with torch.no_grad():
        before = model(input_ids=text).logits
        head = model.lm_head.weight.clone()
        model.lm_head.weight = torch.nn.Parameter(head)  # no longer the table
        known = dict(model.named_parameters())
        for name, change in replaced(case, forms, codes):
            known[name].add_(change)
        after = model(input_ids=text).logits
    p, q = log_softmax(before, -1), log_softmax(after, -1)
    expected = float(kl_div(q, p, log_target=True, reduction="sum")) / text.numel()
    by_window = [
        [float(cross_entropy(rows[:-1], ids[1:])) for rows, ids in zip(logits, text, strict=True)]
        for logits in (before, after)
    ]
    losses = [fmean(nats) for nats in by_window]
    spread = stdev(b - a for a, b in zip(*by_window, strict=True)) / len(text) ** 0.5
    limits.numbers_agree("divergence", found["kl"], expected, limits.divergence(MODEL, 2, expected))
    limits.numbers_agree("the original's perplexity", found["original"], math.exp(losses[0]), MODEL)
    grown = math.exp(losses[1] - losses[0])
    limits.numbers_agree("perplexity", found["perplexity"], grown, limits.roundings("fp16"))  # a form rounds gains, too
    assert found["kl"] > 1e-4
    assert found["error"] == pytest.approx(found["perplexity"] * spread, rel=0.05)
    assert found["tokens"] == text.numel() and 0 < found["top1"] <= 1


@pytest.mark.thorough
def test_the_original_in_fp16_costs_next_to_nothing(case: Case, codes: dict[str, Path], tmp_path: Path) -> None:
    write_original(case.model, case.texts, tmp_path / "original.safetensors")
    forms = dict.fromkeys(chosen(case), "fp16")
    found = measured_forms(case.model, tmp_path / "original.safetensors", held(case, forms, codes))
    limits.numbers_agree("divergence", found["kl"], 0, MODEL, size=1)
    limits.numbers_agree("perplexity", found["perplexity"], 1, limits.roundings("fp16"))
    assert found["top1"] == 1


@pytest.mark.thorough(but=["phi3"])
def test_a_part_does_not_hold_what_is_another_s(case: Case, codes: dict[str, Path]) -> None:
    first: Part = case.parts[0]
    with pytest.raises(Exception, match="does not hold lm_head.weight"):
        held(case, chosen(case), codes)[0].stored("lm_head.weight")
    assert first.kind == "layers"


def test_a_head_with_a_bias_and_experts_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the head's rows have their own rows of the bias; experts, of which nothing is chosen, are in INT8."""
    monkeypatch.setattr(module, "ROWS", 40)
    monkeypatch.setattr(stored, "rows_at_once", lambda columns: 24)
    case = write_case("phimoe", tmp_path)
    assert any("bias" in path for path in case.parts[-1].shapes)
    write_original(case.model, case.texts, tmp_path / "original.safetensors")
    paths = [path for part in case.parts for path in matrices(part.shapes)]
    files = dict.fromkeys([part.name for part in case.parts], tmp_path / "none")  # fp16 and INT8 need no codes
    exact = measured_forms(
        case.model, tmp_path / "original.safetensors", held(case, dict.fromkeys(paths, "fp16"), files)
    )
    experts = [path for path in paths if "experts" in path]
    mixed = held(case, {path: "fp16" for path in paths if path not in experts}, files)
    found = measured_forms(case.model, tmp_path / "original.safetensors", mixed)
    limits.numbers_agree("divergence", exact["kl"], 0, MODEL, size=1)
    assert experts and 1e-7 < found["kl"] < 0.1
