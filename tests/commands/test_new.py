"""`shardmill new`: a config of one's own from a look at a checkpoint, with the real client and the tests' hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from checkpoint.hub_server import COMMIT, REPO, Hub, running
from checkpoint.samples import two_file_checkpoint
from reciter import failure, shardmill

from shardmill import config
from shardmill.checkpoint import hub_listing as client
from shardmill.checkpoint.hub_listing import HubAccess
from shardmill.pipeline import locks
from shardmill.pipeline.resolve import load_resolved, workflow_root
from shardmill.pipeline.words import size

SOURCE = f"hf:{REPO}"
TEXTS = ("config.json", "tokenizer.json")


def checkpoint(**changes: Any) -> dict[str, bytes]:
    """The demo's config.json, perhaps with changes, its tokenizer, and weights that nobody may ask for."""
    found = {name: (workflow_root() / "resources/demo" / name).read_bytes() for name in TEXTS}
    found["config.json"] = json.dumps(json.loads(found["config.json"]) | changes).encode()
    return {name: body for name, body in two_file_checkpoint().items() if "model" in name} | found


def fixed(shown: str) -> list[str]:
    """The lines of a plan, but those on what this machine has free, and how busy it is."""
    return [line for line in shown.splitlines() if not line.startswith(("disk: ", "download: ", "time: "))]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The tests' hub, which is the default, and an empty working folder."""
    monkeypatch.chdir(tmp_path)
    with running(checkpoint()) as served:
        access = partial(HubAccess, endpoint=served.endpoint, cache_dir=tmp_path / "hub")
        monkeypatch.setattr(client, "HubAccess", access)
        yield served


def test_it_writes_a_config_and_its_lock_and_shows_the_plan(hub: Hub) -> None:
    said = shardmill("new", SOURCE)
    assert said.exit_code == 0
    assert f"wrote tiny.lock: {REPO} main at {COMMIT[:7]}\n" in said.stderr and "wrote tiny.yaml\n" in said.stderr
    assert f"tiny: phi3, {REPO}@{COMMIT}" in said.stdout
    assert said.stdout.endswith("next: snakemake --cores 4 all --configfile tiny.yaml\n")
    assert not any(hub.downloads(name) for name in hub.files if name.endswith(".safetensors"))
    assert not hub.downloads("tokenizer.json")
    hub.requests.clear()
    assert load_resolved(Path("tiny.yaml")).source.revision == COMMIT and not hub.requests
    shown = shardmill("plan", "tiny.yaml").stdout
    assert fixed(shown) == fixed(said.stdout.partition("next: ")[0])
    # The hub lists the checkpoint's files, which it has not sent.
    whole = sum(len(body) for name, body in hub.files.items() if name != "README.md")
    brought = len(hub.files["config.json"]) + len(hub.files["model.safetensors.index.json"])
    assert f"download: {size(whole - brought)}; the rest of its {size(whole)} is here; " in shown
    assert f"# {SOURCE}, a phi3. " in Path("tiny.yaml").read_text()


def test_it_goes_into_configs_where_that_is(hub: Hub) -> None:
    Path("configs").mkdir()
    assert "wrote configs/tiny.yaml" in shardmill("new", SOURCE).stderr
    assert set(Path("configs").iterdir()) == {Path("configs/tiny.yaml"), Path("configs/tiny.lock")}
    assert failure("new", SOURCE).startswith("configs/tiny.yaml: is there already")


@pytest.mark.parametrize(
    ("limit", "asked", "slots"),
    [(131072, [], 2048), (512, [], 512), (512, ["--context", "64"], 64), (512, ["--context", "16"], 16)],
)
def test_the_context_is_no_longer_than_the_model_s(hub: Hub, limit: int, asked: list[str], slots: int) -> None:
    hub.files = checkpoint(max_position_embeddings=limit, rope_scaling=None)
    assert shardmill("new", SOURCE, *asked).exit_code == 0
    assert config.load(Path("tiny.yaml")).context == slots


@pytest.mark.parametrize(("revision", "locked"), [("", True), ("@main", True), (f"@{COMMIT}", False)])
def test_a_revision_is_kept_as_it_was_asked(hub: Hub, revision: str, locked: bool) -> None:
    assert shardmill("new", SOURCE + revision).exit_code == 0
    source = yaml.safe_load(Path("tiny.yaml").read_text())["source"]
    assert source == {"repo": REPO} | ({"revision": revision[1:]} if revision else {})
    assert Path("tiny.lock").exists() == locked
    assert ("shardmill lock --upgrade" in Path("tiny.yaml").read_text()) == locked


def test_a_folder_takes_no_lock(hub: Hub) -> None:
    folder = workflow_root() / "resources/demo"
    said = shardmill("new", folder)
    assert said.exit_code == 0 and "tensors: those that config.json describes" in said.stdout
    assert config.load(Path("demo.yaml")).source.path == str(folder)
    assert not hub.requests and not list(Path().glob("*.lock"))


def without(*names: str) -> dict[str, bytes]:
    return {name: body for name, body in checkpoint().items() if name not in names}


SINGLE = "model.safetensors"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no config.json": ({"files": without("config.json")}, "holds no config.json"),
    "no tokenizer": ({"files": without("tokenizer.json")}, "holds no tokenizer.json"),
    "no safetensors": ({"files": {"config.json": b"{}", "README.md": b""}}, f"neither {SINGLE} nor"),
    "pickles": ({"files": {"config.json": b"{}", "pytorch_model.bin": b""}}, "is a pickle checkpoint"),
    "several models": (
        {"files": {f"{folder}/{name}": b"{}" for folder in "ab" for name in ("config.json", SINGLE)}},
        f"holds several models, or one in another layout (a/{SINGLE}, b/{SINGLE})",
    ),
    "an adapter": (
        {"files": {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}},
        "holds a LoRA adapter and no model",
    ),
    "no family": ({"files": checkpoint(model_type="nope")}, "model_type 'nope' is not supported"),
    "no JSON": ({"files": checkpoint() | {"config.json": b"{"}}, "config.json"),
    "gated, without a token": ({"gated_status": 401}, "gated; accept its licence at"),
    "gated, with a token": ({"gated_status": 403}, "your token has no access yet"),
    "401": ({"statuses": [401]}, "refused the token (401)"),
    "403": ({"statuses": [403]}, "forbids access (403)"),
    "404": ({"statuses": [404]}, "answered 404"),
    "renamed": ({"renamed": "acme/new"}, "acme/tiny: is called acme/new now; write that name"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_it_lacks_is_one_line_and_nothing_is_written(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The answer is final, so that nothing waits."""
    monkeypatch.setattr("shardmill.checkpoint.hub_limits.time.sleep", lambda _: pytest.fail("waits"))
    changes, said = FAULTS[fault]
    for name, value in changes.items():
        setattr(hub, name, value)
    assert said in failure("new", SOURCE)
    assert not [*Path().glob("*.yaml"), *Path().glob("*.lock")]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hf:acme/absent", "acme/absent: no such model at"),
        (f"{SOURCE}@v9", "acme/tiny: has no revision 'v9'"),
        ("hf:tiny", "hf:tiny: not an address"),
        (REPO, "no such folder; a repository on the hub is hf:OWNER/NAME"),
    ],
)
def test_what_is_not_there_is_one_line(hub: Hub, source: str, said: str) -> None:
    assert said in failure("new", source)


def test_without_a_network_it_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "run once online without HF_HUB_OFFLINE" in failure("new", SOURCE)


def test_a_run_that_may_choose_no_commit_can_be_told_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """`new` is what a person runs, and what it writes is what CI takes."""
    monkeypatch.setenv("CI", "true")
    assert shardmill("new", SOURCE).exit_code == 0
    assert locks.with_locks(config.load(Path("tiny.yaml")), Path("tiny.yaml"), "").source.revision == COMMIT
