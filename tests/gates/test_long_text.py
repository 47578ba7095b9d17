"""The divergence along a long text: flat if a recurrence is right, and a mistake that comes late shows where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import tiny
import torch
from models import tiny_families
from models.test_shipped_families import Shipped, ship
from numpy.typing import NDArray
from safetensors.torch import load_file

from shardmill.files import write_json
from shardmill.gates.measurement import Measurement, Stretch
from shardmill.gates.passes import LONG, SAMPLED, STRETCH, sampled
from shardmill.gates.stack import cost_along
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.machine import is_portable
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import perform
from shardmill.pipeline.steps import reference
from shardmill.runtime.engine import Engine
from shardmill.runtime.kv import Floats, KVLayout
from shardmill.runtime.manifest import in_place
from shardmill.runtime.program import HostCaches

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="changes the caches of the portable engine"),
    pytest.mark.slow,
]
TEXT = Path(__file__).parents[2] / "resources/text/parity.txt"
LATE = 1500


@dataclass(frozen=True)
class Long:
    """A build, and what the reference step says of a long text."""

    shipped: Shipped
    known: Mapping[str, torch.Tensor]

    def along(self) -> tuple[float, list[float]]:
        """The mean divergence, and the mean of each stretch."""
        manifest = in_place(self.shipped.plan, self.shipped.packages, self.shipped.table)
        tokens = self.known["long_tokens"].tolist()
        mean, *stretches = cost_along(lambda: Engine(manifest, Path("/")), tokens, self.known["long_logits"])
        assert isinstance(mean, Measurement) and mean.name == "kl"
        found = [one for one in stretches if isinstance(one, Stretch)]
        assert [(one.start, one.stop) for one in found] == [
            (stop - SAMPLED, stop) for stop in range(STRETCH, LONG + 1, STRETCH)
        ]
        return mean.value, [one.kl for one in found]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Long]:
    """A tiny model whose heads forget next to nothing, so that errors of the state stay in it."""
    folder = tmp_path_factory.mktemp("long")
    model = tiny_families.tiny_model("qwen3_5_text", max_position_embeddings=LONG)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name.endswith("A_log"):
                weight.uniform_(-10, -7, generator=torch.Generator().manual_seed(0))
    model.to(torch.bfloat16).save_pretrained(folder / "checkpoint")
    tiny.train_tokenizer().save(str(folder / "checkpoint" / "tokenizer.json"))
    shipped = ship(folder / "checkpoint", folder, {"max": 8}, LONG, state="host")
    write_json(folder / "plan.json", dict(shipped.plan))
    settings = {"positions": 16, "perplexity_positions": 32}
    task = reference.task(
        folder / "plan.json", folder / "source.receipt.json", TEXT, settings, {"code": "", "packages": {}}
    )
    perform(task, {"states": folder / "reference.safetensors"}, folder / "r.receipt.json", Store(folder / ".store"))
    yield Long(shipped, load_file(folder / "reference.safetensors"))


def test_the_reference_has_the_logits_of_a_long_text(build: Long) -> None:
    """The same as of one pass of transformers, at the sampled positions."""
    tokens = build.known["long_tokens"]
    assert len(tokens) == LONG and torch.equal(tokens[:32], build.known["tokens"])
    with torch.no_grad():
        truth = tiny.transformers_model(build.shipped.source)(tokens[None]).logits[0][sampled(LONG)]
    limits.rows_agree("logits of a long text", build.known["long_logits"], truth, limits.model(4, 768))


@pytest.fixture(scope="module")
def right(build: Long) -> tuple[float, list[float]]:
    return build.along()


def test_the_divergence_does_not_grow(right: tuple[float, list[float]]) -> None:
    """Of a tiny model, which does not get to know a text, so that every stretch is alike."""
    mean, along = right
    assert 0 < mean <= THRESHOLDS["kl"].limit and max(along) <= 2 * min(along)


def lost_late(real: Any) -> Any:
    """After LATE tokens, what is pending is no longer folded."""

    def masks(self: KVLayout, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        found: dict[str, Floats] = real(self, at, block, taps)
        if at[0] >= LATE:
            found["recurrent_read_mask"][:, : block + taps - 1] = 0
        return found

    return masks


def cut_off(real: Any) -> Any:
    """After every pass, a state keeps eight bits of each number, and the others are cut off."""

    def write(self: HostCaches, outputs: Mapping[str, Any], given: Mapping[str, Floats]) -> None:
        real(self, outputs, given)
        for name, array in self.arrays.items():
            if name.startswith("s_"):
                bits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
                array[:] = bits.view(np.float32)

    return write


MISTAKES: dict[str, tuple[Any, str, Callable[[Any], Any], int]] = {  # and how many stretches are as before
    "tokens lost late": (KVLayout, "_recurrent_masks", lost_late, LATE // STRETCH),
    "a state of few bits": (HostCaches, "write", cut_off, 0),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows_where_it_is(
    build: Long, right: tuple[float, list[float]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of few bits would pass by the mean alone, and grows all the same."""
    owner, attribute, change, alike = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    mean, along = build.along()
    assert along[:alike] == right[1][:alike] and along[-1] > 5 * along[0]
    assert (mean <= THRESHOLDS["kl"].limit) == (name == "a state of few bits")
