"""A head that is trained here: its steps at once, an interrupted run, and what it is worth on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardmill.draft import measure, states, train
from shardmill.draft.unrolled import unrolled
from shardmill.gates import eagle3
from shardmill.models.eagle3 import default_taps

LAYERS, WINDOW = 6, 24
TAPS = default_taps(LAYERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    return states.load_reference(tiny.write_checkpoint(folder, layers=LAYERS))


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(1, tiny.VOCAB, (12, WINDOW), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def trained(
    model: Any, windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path, int], eagle3.ReferenceHead]:
    """Trains on the windows for some steps, with a file of progress after every other one."""
    monkeypatch.setattr(train, "SAVED", 2)
    seen = states.compute_windows(model, windows, TAPS)
    table, rows = model.get_input_embeddings().weight, torch.arange(tiny.VOCAB)

    def run(folder: Path, steps: int, say: Callable[[str], None] = lambda _: None) -> eagle3.ReferenceHead:
        head = train.new_head(train.head_config(model.config, len(rows)), table)
        return train.trained(head, seen, table, table, train.Run(folder, steps, say))

    return run


def test_steps_at_once_are_those_of_the_published_code(tmp_path: Path) -> None:
    """Each row of each step equals the last row of a separate text, fed as decoding feeds it."""
    folder = heads.write_head(tmp_path / "head")
    head, w = eagle3.load_head(folder), heads.read_head(folder)
    random = torch.Generator().manual_seed(3)
    embedded = torch.randn(1, 9, tiny.HIDDEN, generator=random)
    taps = torch.randn(1, 9, 3 * tiny.HIDDEN, generator=random)
    found = list(unrolled(head, embedded, taps, 3))
    assert [one.shape[1] for one in found] == [8, 7, 6]
    for row in range(6):
        read = taps[0, : row + 1] @ w["fc.weight"].T
        for step in range(3):
            out = heads.published(w, embedded[0, 1 : row + step + 2], read)
            torch.testing.assert_close(found[step][0, row], heads.logits(w, out[-1]), rtol=1e-4, atol=1e-4)
            read = torch.cat([read, out[-1:]])


def test_states_are_those_of_whole_texts_and_files_are_kept(
    model: Any, windows: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "KEPT_TOGETHER", 5)
    found = states.kept_windows(tmp_path, model, windows, TAPS, lambda _: None)
    with torch.no_grad():
        out = model(windows[7:8], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[layer] for layer in TAPS], dim=-1)
    torch.testing.assert_close(found.taps[7:8].float(), expected, rtol=2e-3, atol=2e-3)
    logits = model.lm_head(found.last[7:8].float())
    torch.testing.assert_close(logits, out.logits, rtol=1e-2, atol=1e-2)
    made = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(made) == 3
    again = states.kept_windows(tmp_path, None, windows, TAPS, lambda _: None)
    assert torch.equal(again.taps, found.taps) and made == {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()}


def test_an_interrupted_run_ends_like_one_that_was_not(
    trained: Callable[..., eagle3.ReferenceHead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither leaves its number of threads to the rest of the process."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(train, "THREADS", threads + 1)
    whole = trained(tmp_path / "whole", 6)

    def stop(line: str) -> None:
        if line.startswith("step 4 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "halves", 6, stop)
    done = load_file(tmp_path / "halves/progress.safetensors")["done"]
    assert int(done) == 4
    rest = trained(tmp_path / "halves", 6)
    assert torch.get_num_threads() == threads
    for (name, one), other in zip(whole.named_parameters(), rest.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_it_learns(trained: Callable[..., eagle3.ReferenceHead], tmp_path: Path) -> None:
    losses: list[float] = []
    trained(tmp_path, 24, lambda line: losses.append(float(line.rpartition(" ")[2])))
    assert losses[-1] < losses[0] - 0.2


def test_what_is_measured_is_what_decoding_would_accept(
    model: Any,
    trained: Callable[..., eagle3.ReferenceHead],
    windows: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "PROMPT", 8)
    monkeypatch.setattr(measure, "NEW", 24)
    head, table = trained(tmp_path, 30).eval().requires_grad_(False), model.get_input_embeddings().weight
    rows = torch.arange(tiny.VOCAB)
    found = measure.measure_acceptance(head, model, windows[:3], TAPS, table, rows)
    texts = measure.continued(model, windows[:3, :8])
    assert texts.tolist() == [
        model.generate(one[None], max_new_tokens=24, min_new_tokens=24, do_sample=False)[0].tolist()
        for one in windows[:3, :8]
    ]
    w = {name: value for name, value in head.state_dict().items()}
    for cap in measure.CAPS:
        tokens = passes = 0
        for text in texts.tolist():
            taps, known = states.compute_windows(model, torch.tensor([text]), TAPS).taps[0].float(), 9
            while known < 32:
                drafts = drafted(w, table, text[:known], taps[: known - 1], cap)
                accepted = next((i for i, t in enumerate(drafts) if text[known + i : known + i + 1] != [t]), cap)
                accepted = min(accepted, 32 - known - 1)
                known, passes, tokens = known + accepted + 1, passes + 1, tokens + accepted + 1
        assert found.tokens_per_pass[str(cap)] == pytest.approx(tokens / passes, abs=1e-3)
    assert sum(found.by_place) > 0 and found.tokens == 3 * 23


def drafted(w: dict[str, Tensor], table: Tensor, context: list[int], taps: Tensor, count: int) -> list[int]:
    """Return what `heads.greedy` drafts with a head of other sizes, whose rows are the model's tokens."""
    head = eagle3.ReferenceHead(train.head_config(tiny.hf_config(LAYERS), tiny.VOCAB))
    head.load_state_dict(w)
    tokens, read, found = list(context[1:]), head.fuse(taps), list[int]()
    with torch.no_grad():
        while len(found) < count:
            out = head(table[torch.tensor(tokens)], read)
            found.append(int(head.logits(out[-1:])[0].argmax()))
            tokens, read = [*tokens, found[-1]], torch.cat([read, out[-1:]])
    return found


def test_a_written_head_is_built_like_a_published_one(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head with a smaller vocabulary too: the most frequent tokens of the text."""
    monkeypatch.setattr(train, "MOST_ROWS", 100)
    text = torch.arange(60, 200).repeat(3)[:300]  # its first 20 tokens occur more often
    rows = train.drafted_rows(text, tiny.VOCAB)
    assert rows.tolist() == list(range(60, 160))
    head = train.new_head(train.head_config(model.config, 100), model.lm_head.weight[rows])
    train.write_head(tmp_path / "head", head, rows, tiny.VOCAB)
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint", layers=LAYERS), tmp_path / "source")
    tiny.fetched(tmp_path / "head", source / "drafter")
    parts, plan = tiny.split(source, topology=[[0, 6]], drafter={"path": str(tmp_path / "head")})
    assert (plan["drafter"]["taps"], plan["drafter"]["vocab"]) == ([*TAPS], 100)
    assert parts["layers_00_06"].taps == tuple(sorted({*TAPS}))
    again = eagle3.load_head(tmp_path / "head")
    torch.testing.assert_close(again.lm_head.weight, model.lm_head.weight[rows], rtol=1e-3, atol=1e-3)
