"""A head that is trained here: its steps at once, an interrupted run, and what it is worth on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import heads
import limits
import pytest
import tiny
import torch
from safetensors.torch import load_file
from shardmill_lab.draft import measure, states, train, windows
from shardmill_lab.draft.unrolled import Rows, right_drafts, unrolled
from torch import Tensor

from shardmill.errors import ShardmillError
from shardmill.gates import eagle3
from shardmill.models.eagle3 import default_taps

LAYERS, WINDOW = 6, 24
TAPS = default_taps(LAYERS)
HEAD = limits.model(2, 3 * tiny.HIDDEN)  # one layer, and the projections before it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    return states.load_reference(tiny.write_checkpoint(folder, layers=LAYERS))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(1, tiny.VOCAB, (length,), generator=draw).tolist() for length in (9, 7, 8, 8, 12, 7, 9)]


@pytest.fixture(scope="module")
def seen(model: Any, prompts: list[list[int]]) -> states.Windows:
    return states.continued(model, prompts, TAPS, WINDOW)


@pytest.fixture
def trained(model: Any, seen: states.Windows, monkeypatch: pytest.MonkeyPatch) -> Callable[..., eagle3.Eagle3Head]:
    """Trains on the texts for some steps, with a file of progress after every other one."""
    monkeypatch.setattr(train, "SAVED", 2)
    table, ids = model.get_input_embeddings().weight, torch.arange(tiny.VOCAB)

    def run(folder: Path, steps: int, say: Callable[[str], None] = lambda _: None) -> eagle3.Eagle3Head:
        head = train.new_head(train.head_config(model.config, len(ids)), table, seen)
        return train.trained(head, seen, table, table, ids, train.Run(folder, folder, steps, say))

    return run


def test_steps_at_once_are_those_of_the_published_code(tmp_path: Path) -> None:
    """Each row of each step is the last row of a separate text, fed as decoding feeds it; no other row is computed."""
    folder = heads.write_head(tmp_path / "head")
    head, w = eagle3.load_head(folder), heads.read_head(folder)
    random = torch.Generator().manual_seed(3)
    embedded = torch.randn(2, 9, tiny.HIDDEN, generator=random)
    taps = torch.randn(2, 9, 3 * tiny.HIDDEN, generator=random)
    going = [{0: {1, 3, 4, 6}, 1: {0, 5}}, {0: {3, 4}, 1: {0}}, {0: {4}, 1: set()}]  # by step and text

    def goes_on(step: int, rows: Rows) -> Tensor:
        assert {t: set(rows.places[t][rows.real[t]].tolist()) for t in (0, 1)} == going[step]
        wanted = going[step + 1] if step < 2 else {0: set(), 1: set()}
        return torch.tensor([[place in wanted[t] for place in rows.places[t].tolist()] for t in (0, 1)])

    asked = torch.tensor([[place in going[0][t] for place in range(9)] for t in (0, 1)])
    found = list(unrolled(head, embedded, taps, asked, 5, goes_on))
    assert len(found) == 3  # no row is left then
    for text in (0, 1):
        for place in going[0][text]:
            read = taps[text, : place + 1] @ w["fc.weight"].T
            for step in range(min(3, 8 - place)):  # the text has no token for further steps
                out = heads.published(w, embedded[text, 1 : place + step + 2], read)
                for row in (found[step].places[text].eq(place) & found[step].real[text]).nonzero()[:, 0].tolist():
                    logits = found[step].logits[text, row]
                    limits.rows_agree(f"step {step}", logits, heads.logits(w, out[-1]), HEAD)
                read = torch.cat([read, out[-1:]])


def test_a_draft_ends_with_the_answer() -> None:
    tokens, rows = (
        torch.tensor([[1, 2, 3, 4]]),
        Rows(torch.tensor([[0]]), torch.tensor([[True]]), torch.eye(5)[None, 3:4]),
    )
    for more in (True, False):
        compare = right_drafts(tokens, torch.tensor([[False, True, True, more]]), torch.arange(5))
        assert [each.tolist() for each in compare(0, rows)] == [[[True]], [[more]]]


def test_texts_are_those_that_transformers_writes(model: Any, prompts: list[list[int]], seen: states.Windows) -> None:
    """Whatever stands beside them; and the states are the states of whole texts."""
    for row, prompt in enumerate(prompts):
        given = torch.tensor([prompt])
        text = model.generate(given, max_length=WINDOW, min_length=WINDOW, do_sample=False)[0]
        assert seen.tokens[row].tolist() == text.tolist()
        assert seen.own[row].tolist() == [False] * len(prompt) + [True] * (WINDOW - len(prompt))
        with torch.no_grad():
            out = model(text[None], output_hidden_states=True)
        expected = torch.cat([out.hidden_states[layer] for layer in TAPS], dim=-1)[0]
        limits.rows_agree("taps", seen.taps[row], expected, limits.roundings("fp16"))  # kept in fp16
        logits = model.lm_head(seen.last[row].float())
        limits.rows_agree("logits", logits, out.logits[0], limits.roundings("fp16"))


def test_a_text_ends_where_the_model_ends_it(
    model: Any, prompts: list[list[int]], seen: states.Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = int(seen.tokens[0, 11])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, tiny.VOCAB - 1])
    found = states.continued(model, prompts[:2], TAPS, WINDOW)
    for text, own, whole in zip(found.tokens, found.own, seen.tokens, strict=False):
        length = int(own.long().argmax()) + int(own.sum())
        assert own.sum() > 0 and text[:length].tolist() == whole[:length].tolist()
        assert end not in text[own][:-1] and (length == WINDOW or text[length - 1] == end)
    assert int(found.own[0].sum()) <= 3
    monkeypatch.setattr(model.generation_config, "eos_token_id", int(seen.tokens[0, 9]))
    assert states.continued(model, prompts[:1], TAPS, WINDOW).taps.shape == (1, WINDOW, 3 * tiny.HIDDEN)


def test_a_text_that_fills_its_window_is_learnt_as_it_is(model: Any, seen: states.Windows) -> None:
    whole = seen.tokens[0].tolist()
    found = states.continued(model, [whole, whole[:5]], TAPS, WINDOW)
    assert found.own.tolist() == [[True] * WINDOW, [False] * 5 + [True] * (WINDOW - 5)]
    limits.rows_agree("taps", found.taps[0], seen.taps[0], limits.roundings("fp16"))


def test_files_are_kept(model: Any, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "TOGETHER", 3)
    monkeypatch.setattr(windows, "WINDOW", WINDOW)
    found = states.kept_windows(tmp_path, model, prompts, TAPS, lambda _: None)
    made = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(made) == 3 and found.tokens.shape == (7, WINDOW)
    again = states.kept_windows(tmp_path, None, prompts, TAPS, lambda _: None)
    assert torch.equal(again.taps, found.taps) and made == {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()}


def test_matrices_alone_multiply_in_bf16(
    model: Any, seen: states.Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = states.load_reference(tiny.write_checkpoint(tmp_path / "checkpoint", layers=LAYERS))
    monkeypatch.setattr(states, "multiplies_bf16", lambda: True)
    states.multiply_in_bf16(again)
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    with torch.no_grad():
        rough, exact = (each(seen.tokens[:2]).logits for each in (again, model))
    error = (rough - exact).norm() / exact.norm()
    assert rough.dtype == torch.float32 and 1e-4 < error < 2e-2


def test_an_interrupted_run_ends_like_one_that_was_not(
    trained: Callable[..., eagle3.Eagle3Head], tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", 6)

    def stop(line: str) -> None:
        if line.startswith("step 4 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "halves", 6, stop)
    done = load_file(tmp_path / "halves/progress.safetensors")["done"]
    assert int(done) == 4
    rest = trained(tmp_path / "halves", 6)
    for (name, one), other in zip(whole.named_parameters(), rest.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_fewer_threads_than_training_computes_with_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's products in bf16 are wrong then."""
    plan = {"architecture": {"layers": train.LEAST_LAYERS}}
    for limit, says in (("1", "OMP_THREAD_LIMIT is 1"), ("2", "config.json")):
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
        with pytest.raises((ShardmillError, ValueError), match=says):
            train.train_head(tmp_path, plan, [], [], train.Run(tmp_path, tmp_path, 1, print), tmp_path / "head")


def test_a_gradient_that_is_not_finite_leaves_the_progress_alone(
    trained: Callable[..., eagle3.Eagle3Head], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, right, calls = trained(tmp_path / "whole", 6), train._loss, list[int]()

    def damaged(head: eagle3.Eagle3Head, *arguments: Any) -> Tensor:
        calls.append(1)
        scale = torch.inf if len(calls) == 4 else 1.0
        return right(head, *arguments) + scale * 0 * head.fc.weight.sum()

    monkeypatch.setattr(train, "_loss", damaged)
    with pytest.raises(ShardmillError, match="step 4: the gradient is not finite"):
        trained(tmp_path / "run", 6)
    held = load_file(tmp_path / "run/progress.safetensors")
    assert int(held["done"]) == 2 and all(value.isfinite().all() for value in held.values())
    rest = trained(tmp_path / "run", 6)
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), rest.parameters(), strict=True))


def test_the_loss_is_the_distance_from_the_model_s_distribution(
    model: Any, seen: states.Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first token of each draft, after the head's first step; its last norm begins with the model's sizes."""
    monkeypatch.setattr(train, "UNROLLED", 1)
    monkeypatch.setattr(train, "multiplies_bf16", lambda: False)
    table, ids, chosen = model.get_input_embeddings().weight, torch.arange(tiny.VOCAB), torch.tensor([1, 4])
    head = train.new_head(train.head_config(model.config, len(ids)), table, seen)
    with torch.no_grad():
        tap = seen.taps[0][seen.own[0], 2 * tiny.HIDDEN :].float()
        sizes = [each.square().mean(0).sqrt() for each in (head.norm(tap), seen.last[0][seen.own[0]].float())]
        limits.numbers_agree("sizes", *sizes, limits.roundings("fp16"))
        found, expected = train._loss(head, seen, chosen, table, table, ids), list[float]()
        for text in chosen.tolist():
            tokens, last = seen.tokens[text], seen.last[text].float()
            logits = head.logits(head(table[tokens[1:]], head.fuse(seen.taps[text, :-1].float()))).log_softmax(-1)
            truth = (last @ table.T).softmax(-1)
            begin = int(seen.own[text].long().argmax()) - 1
            expected += [-float((truth[i + 1] * logits[i]).sum()) for i in range(begin, WINDOW - 2)]
    limits.numbers_agree("the loss", found, sum(expected) / len(expected), HEAD)


def test_answers_of_one_token_teach_nothing(model: Any, seen: states.Windows, tmp_path: Path) -> None:
    table, ids = model.get_input_embeddings().weight, torch.arange(tiny.VOCAB)
    first = replace(seen, own=seen.own & (seen.own.long().cumsum(1) == 1))
    head = train.new_head(train.head_config(model.config, len(ids)), table, seen)
    with pytest.raises(ShardmillError, match="nothing to draft"):
        train.trained(head, first, table, table, ids, train.Run(tmp_path, tmp_path, 1, print))


def test_it_learns(trained: Callable[..., eagle3.Eagle3Head], tmp_path: Path) -> None:
    losses: list[float] = []
    trained(tmp_path, 24, lambda line: losses.append(float(line.rpartition(" ")[2])))
    assert losses[-1] < losses[0] - 0.2


def test_what_is_measured_is_what_decoding_would_accept(
    model: Any, trained: Callable[..., eagle3.Eagle3Head], seen: states.Windows, tmp_path: Path
) -> None:
    """In texts of several lengths, the shortest of two tokens."""
    head, table = trained(tmp_path, 30).eval().requires_grad_(False), model.get_input_embeddings().weight
    ends = torch.tensor([WINDOW, WINDOW, 20, 10, WINDOW, 15, 18])
    texts = replace(seen, own=seen.own & (torch.arange(WINDOW) < ends[:, None]))
    found = measure.measure_acceptance(head, texts, table, torch.arange(tiny.VOCAB))
    w = {name: value for name, value in head.state_dict().items()}
    for cap in measure.CAPS:
        tokens = passes = 0
        for text, own, taps in zip(texts.tokens.tolist(), texts.own.tolist(), texts.taps.float(), strict=True):
            known, end = own.index(True) + 1, own.index(True) + sum(own)
            while known < end:
                drafts = drafted(w, table, text[:known], taps[: known - 1], cap)
                following = text[known:end]
                accepted = next((i for i, t in enumerate(drafts) if following[i : i + 1] != [t]), cap)
                accepted = min(accepted, end - known - 1)
                known, passes, tokens = known + accepted + 1, passes + 1, tokens + accepted + 1
        assert found.tokens_per_pass[str(cap)] == pytest.approx(tokens / passes, abs=1e-3)
    assert sum(found.by_place) > 0 and found.tokens == tokens


def drafted(w: dict[str, Tensor], table: Tensor, context: list[int], taps: Tensor, count: int) -> list[int]:
    """Return what `heads.greedy` drafts with a head of other sizes, whose rows are the model's tokens."""
    head = eagle3.Eagle3Head(train.head_config(tiny.hf_config(LAYERS), tiny.VOCAB))
    head.load_state_dict(w)
    tokens, read, found = list(context[1:]), head.fuse(taps), list[int]()
    with torch.no_grad():
        while len(found) < count:
            out = head(table[torch.tensor(tokens)], read)
            found.append(int(head.logits(out[-1:])[0].argmax()))
            tokens, read = [*tokens, found[-1]], torch.cat([read, out[-1:]])
    return found


def test_a_written_head_is_built_like_a_published_one(
    model: Any, seen: states.Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head with a smaller vocabulary too: the most frequent tokens of the text."""
    monkeypatch.setattr(train, "MOST_ROWS", 100)
    text = torch.arange(60, 200).repeat(3)[:300]  # its first 20 tokens occur more often
    rows = train.frequent_tokens(text, tiny.VOCAB)
    assert rows.tolist() == list(range(60, 160))
    head = train.new_head(train.head_config(model.config, 100), model.lm_head.weight[rows], seen)
    train.write_head(tmp_path / "head", head, rows, tiny.VOCAB)
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint", layers=LAYERS), tmp_path / "source")
    tiny.fetched(tmp_path / "head", source / "drafter")
    parts, plan = tiny.split(source, topology=[[0, 6]], drafter={"path": str(tmp_path / "head")})
    assert (plan["drafter"]["taps"], plan["drafter"]["vocab"]) == ([*TAPS], 100)
    assert parts["layers_00_06"].spec.taps == tuple(sorted({*TAPS}))
    again = eagle3.load_head(tmp_path / "head")
    limits.numbers_agree("the head's rows", again.lm_head.weight, model.lm_head.weight[rows], limits.roundings("fp16"))
