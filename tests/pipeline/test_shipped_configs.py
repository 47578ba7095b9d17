"""Each config that comes with the project, planned by the published config.json of its checkpoint, without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import yaml
from checkpoint.hub_server import Hub, running
from models.shipped_configs import SHIPPED
from portable_coreml.judge.limits import strictest
from reciter import failure, shardmill

from shardmill import config
from shardmill.checkpoint import hub_listing as client
from shardmill.checkpoint.hub_listing import HubAccess
from shardmill.pipeline import resources
from shardmill.pipeline.preview import Preview, preview
from shardmill.pipeline.resolve import described_to_fit, fitted
from shardmill.plan import tensor_shapes

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted(FOLDER.glob("*.yaml"))}
BUCKETS = {
    "bge-small": (128, 512),
    "qwen3-embedding-0.6b": (128, 512),
    "qwen3-reranker-0.6b": (128, 512),
    "modernbert-embed": (128, 520),
    "embeddinggemma-300m": (128, 520),
    "embeddinggemma-2": (128, 520),
    "privacy-filter": (128, 520),
}
# A config of each kind of layer, of encoder and of setting; the others differ in sizes.
BY_DAY = [
    *("phi-4-mini", "phi-4-mini-all-systems", "gemma-3-4b", "gemma-4-e2b", "granite-4.0-h-1b", "lfm2-8b-a1b"),
    *("mixtral-8x7b", "gpt-oss-20b", "zaya1-8b", "nemotron-3-nano-4b", "recurrentgemma-2b", "qwen3.5-0.8b"),
    *("bge-small", "qwen3-embedding-0.6b", "qwen3-reranker-0.6b", "privacy-filter"),
]
ROUTED = {"mixtral-8x7b", "phi-3.5-moe"}  # whose layers are over the newest systems' limit with all experts


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> config.Config:
    """The config of a name, whose checkpoint on the hub has the published config.json."""
    repo, _, content = SHIPPED[request.param]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    monkeypatch.setattr("shardmill.checkpoint.hub.download_config", lambda *_: file)
    return config.parse(CONFIGS[request.param] | {"source": {"repo": repo, "revision": "0" * 40}})


def test_every_config_is_planned_here() -> None:
    """By the repository that it names; but for the demo's, and for those of checkpoints with random weights."""
    apart = {"demo", "phi-4-mini-synthetic", "privacy-filter-synthetic"}
    assert set(SHIPPED) == set(CONFIGS) - apart
    named = {name: content["source"]["repo"] for name, content in CONFIGS.items() if "repo" in content["source"]}
    assert named == {name: SHIPPED[name][0] for name in named}


@pytest.mark.thorough(but=[f"{name}-{name}" for name in BY_DAY])
@pytest.mark.parametrize(("name", "published"), [(name, name) for name in SHIPPED], indirect=["published"])
def test_no_program_is_over_the_limit_of_its_systems(name: str, published: config.Config) -> None:
    """And nothing is warned of but experts that are routed; the checkpoint has the published number of parameters."""
    _, model = described_to_fit(fitted(published))
    count = sum(map(prod, tensor_shapes(model).values()))
    assert count / 1e9 == pytest.approx(SHIPPED[name][1], rel=5e-3)
    found: Preview = preview(published)
    most = strictest(published.systems).weight_bytes.most
    assert found.weight_file_limit == most
    assert found.refused == ()
    assert max(program.weight_bytes for program in found.programs) <= most
    assert [line[: len("experts: routed")] for line in found.warnings] == ["experts: routed"] * (name in ROUTED)


@pytest.mark.parametrize(("name", "published"), [(name, name) for name in BUCKETS], indirect=["published"])
def test_the_buckets_of_models_with_windows_on_both_sides_leave_out_lengths_that_are_reported_wrong(
    name: str, published: config.Config
) -> None:
    """Others keep theirs, and so does whoever names buckets."""
    assert fitted(published).sizes == BUCKETS[name]
    assert fitted(replace(published, buckets=(64, 512))).sizes == (64, 512)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The tests' hub, which is the default, and a machine on which any model fits."""
    monkeypatch.setattr(resources, "share_mb", lambda: 10**9)
    with running({}) as served:
        access = partial(HubAccess, endpoint=served.endpoint, cache_dir=tmp_path / "hub")
        monkeypatch.setattr(client, "HubAccess", access)
        yield served


@pytest.mark.thorough(but=BY_DAY)
@pytest.mark.parametrize("name", SHIPPED)
def test_each_is_planned_as_it_comes_by_what_the_hub_lists(hub: Hub, name: str) -> None:
    """No weight is asked for: their sizes are in the listing."""
    hub.repo, billions, content = SHIPPED[name]
    hub.files = {"config.json": json.dumps(content).encode(), "tokenizer.json": b"{}", "model.safetensors": b""}
    weights = round(billions * 2e9)
    lfs = {"oid": "0" * 64, "size": weights, "pointerSize": 1}
    hub.rows = {"model.safetensors": {"size": weights, "lfs": lfs}}
    shown = shardmill("plan", "--json", FOLDER / f"{name}.yaml")
    assert shown.exit_code == 0, shown.stderr
    costs = json.loads(shown.stdout)["costs"]
    assert costs["checkpoint"] == weights + len(hub.files["config.json"]) + 2
    assert costs["download"] == costs["checkpoint"] - len(hub.files["config.json"])
    assert not hub.downloads("model.safetensors") and not (FOLDER / f"{name}.lock").exists()


def test_the_demo_is_planned_without_a_hub() -> None:
    assert shardmill("plan", FOLDER / "demo.yaml").exit_code == 0


@pytest.mark.parametrize("name", ["phi-4-mini-synthetic", "privacy-filter-synthetic"])
def test_a_checkpoint_that_is_to_be_made_is_one_line_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(FOLDER)
    command = f"shardmill synth-checkpoint --like configs/{name.removesuffix('-synthetic')}.yaml checkpoints/{name}"
    assert failure("plan", f"configs/{name}.yaml").endswith(f"make it: {command}")
