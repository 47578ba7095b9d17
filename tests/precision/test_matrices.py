"""What calibration sees of a part, on tiny checkpoints: inputs as transformers' modules get them, weights both ways."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import IO

import limits
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from shardmill.precision import calibration
from shardmill.precision.part_costs import Costs, Known, as_stored
from shardmill.precision.windows import windows

from .cases import HELD, WINDOWS, Case, in_memory

MODEL = limits.model(3, 128)


@pytest.fixture
def spool() -> Iterator[IO[bytes]]:
    with TemporaryFile() as file:
        yield file


def inputs(case: Case, name: str) -> Tensor:
    """H of a module over the windows that are not held out, hooked in the whole model."""
    model, found = in_memory(case), []
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda _, args: found.append(args[0].reshape(-1, args[0].shape[-1])))
    with torch.no_grad():
        for text in case.texts[: WINDOWS - HELD]:
            model(input_ids=torch.tensor([text]), use_cache=False)
    x = torch.cat(found)
    return x.T @ x


@pytest.mark.thorough(but=["phi3", "olmo2", "lfm2"])
def test_every_matrix_comes_once_with_the_inputs_that_its_module_has(case: Case) -> None:
    for part in case.parts:
        found = list(case.matrices(part))
        assert [m.path for m in found] == list(calibration.sites(part))
        for m in found:
            assert m.hessian is not None, m.path
            name = "lm_head" if part.kind == "head" else calibration.module_of(m.blocks)
            expected = inputs(case, name)
            limits.numbers_agree(m.path, m.hessian, expected, MODEL)


def test_a_matrix_written_back_is_the_checkpoints(case: Case) -> None:
    for part in case.parts:
        for m in case.matrices(part):
            for name, value in as_stored(m.blocks, m.weight, case.source).items():
                limits.numbers_agree(name, value, case.model.weights(name).float(), limits.roundings("fp32", 2))


def test_a_changed_matrix_costs_what_transformers_says(case: Case, spool: IO[bytes]) -> None:
    """The first matrix of the second layer has its rows turned round, in ours and in transformers' whole model."""
    part = case.parts[1]
    m = next(case.matrices(part))
    costs = Costs(case.model, case.edge(part).held, part.start, spool)
    changed = as_stored(m.blocks, m.weight.flip(0), case.source)
    found = costs.of_layer(m.before, m.index, changed)
    model, text = in_memory(case), torch.tensor([case.texts[-1]])
    with torch.no_grad():
        before = log_softmax(model(input_ids=text).logits[0], dim=-1)
        for name, value in changed.items():
            dict(model.named_parameters())[name].copy_(value)
        after = log_softmax(model(input_ids=text).logits[0], dim=-1)
    expected = float(kl_div(after, before, log_target=True, reduction="batchmean"))
    limits.numbers_agree("a layer's cost", found, expected, MODEL)
    assert found > 1e-3


def test_changed_rows_of_the_head_cost_what_transformers_says(case: Case, spool: IO[bytes]) -> None:
    part = case.parts[-1]
    held = case.edge(part).held
    rows = case.model.head[50:90].float() * 0.7
    found = Costs(case.model, held, case.model.layers, spool).of_head(held, 50, rows)
    whole, text = in_memory(case), torch.tensor([case.texts[-1]])
    with torch.no_grad():
        before = whole(input_ids=text).logits[0]
        whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.clone())
        whole.lm_head.weight[50:90] *= 0.7
        after = whole(input_ids=text).logits[0]
    expected = kl_div(log_softmax(after, -1), log_softmax(before, -1), log_target=True, reduction="batchmean")
    limits.numbers_agree("the head's cost", found, expected, MODEL)
    assert found > 1e-5


def test_nothing_changed_costs_nothing(case: Case, spool: IO[bytes]) -> None:
    part = case.parts[1]
    held = case.edge(part).held
    assert Costs(case.model, held, part.start, spool).of_layer(held, part.start, {}) == 0


def test_divergence_is_pytorchs(spool: IO[bytes]) -> None:
    a, b = torch.randn(300, 50), torch.randn(300, 50)
    expected = kl_div(log_softmax(b, -1), log_softmax(a, -1), log_target=True, reduction="batchmean")
    limits.numbers_agree("divergence", Known([a], spool).divergence([b]), expected, limits.sums("fp32", 50))


def test_a_small_divergence_is_not_lost_in_rounding(spool: IO[bytes]) -> None:
    """Of distributions over a large vocabulary that hardly differ: sums of 20 nats, and a difference of 1e-5."""
    a = 6 * torch.randn(130, 50_000, generator=torch.Generator().manual_seed(0))
    b = a + 0.005 * torch.randn(a.shape, generator=torch.Generator().manual_seed(1))
    both = (log_softmax(one.double(), -1) for one in (b, a))
    expected = float(kl_div(*both, log_target=True, reduction="batchmean"))
    assert expected == pytest.approx(1e-5, rel=0.5)  # as the docstring says
    assert Known([a], spool).divergence([b]) == pytest.approx(expected, rel=0.02)


def test_windows_do_not_overlap_and_begin_as_a_text_begins() -> None:
    cut = windows(list(range(10)), [99], 4, 5)
    assert cut == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    assert windows([1, 2], [], 4, 5) == []
