"""The lock of a config's hub repositories, with the real client and the tests' hub."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.hub_server import COMMIT, REPO, Hub, running
from checkpoint.samples import two_file_checkpoint
from patience import wait_until
from reciter import failure, shardmill

from shardmill import config, files
from shardmill.checkpoint import fetch as step
from shardmill.checkpoint import hub_limits
from shardmill.checkpoint import hub_listing as client
from shardmill.checkpoint.hub_listing import HubAccess
from shardmill.config import Config
from shardmill.errors import CheckpointError, ConfigError
from shardmill.pipeline import locks, options, resolve, snakefile
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.steps import fetch

NEWER = "beef" * 10
CONTENT = {"model": "tiny", "source": {"repo": REPO}, "context": 64, "topology": [[0, 4]], "head": {"slices": 1}}
YAML, LOCK = Path("configs/tiny.yaml"), Path("configs/tiny.lock")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The tests' hub, which is the default, and a working folder with a config."""
    monkeypatch.chdir(tmp_path)
    YAML.parent.mkdir()
    YAML.write_text(json.dumps(CONTENT))
    with running(two_file_checkpoint()) as served:
        default(monkeypatch, served.endpoint, tmp_path / "hub")
        yield served


def default(patch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Make a hub and a cache the default, as the main process and the job that fetches take it."""
    for module in (client, step):
        patch.setattr(module, "HubAccess", partial(HubAccess, endpoint=endpoint, cache_dir=cache))


def taken(content: dict[str, Any] = CONTENT, **more: Any) -> Config:
    return locks.with_locks(config.parse(content), YAML, "tiny.yaml", **more)


def kept(said: pytest.CaptureFixture[str], content: dict[str, Any] = CONTENT) -> str:
    """What a build says when it writes the lock."""
    locks.keep([taken(content)])
    return said.readouterr().err


def refused(**more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        taken(**more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(**changes: Any) -> None:
    """Write another thing into the lock's only entry."""
    content = files.load_json(LOCK)
    content["sources"][0] |= changes
    LOCK.write_text(json.dumps(content))


def test_the_first_build_writes_it_and_from_then_on_it_decides(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = taken()
    assert not LOCK.exists() and first.source.revision == COMMIT
    assert kept(capsys) == f"shardmill: wrote {LOCK}: {REPO} main at {COMMIT[:7]}\n"
    (row,) = files.load_json(LOCK)["sources"]
    sizes = {name: len(body) for name, body in hub.files.items()}
    assert {name: file["size"] for name, file in row["files"].items()} == sizes
    assert {file["digest"].partition(":")[0] for file in row["files"].values()} == {"sha256", "git"}
    hub.commit = NEWER
    hub.requests.clear()
    assert taken().source.revision == COMMIT and kept(capsys) == "" and not hub.requests


def test_a_build_by_a_lock_has_the_keys_of_a_pinned_one(hub: Hub) -> None:
    """What the rules pass to steps, whose keys follow from it, is the same; what is kept of config.json is not."""
    pinned = config.parse({**CONTENT, "source": {"repo": REPO, "revision": COMMIT}})
    assert taken() != pinned and options.settings(taken()) == options.settings(pinned)
    assert locks.with_locks(pinned, YAML, "") is pinned
    locks.keep([taken()])
    one = resolve._key(taken())
    LOCK.write_text(LOCK.read_text() + "\n")
    assert resolve._key(taken()) == one
    changed(files={"config.json": {"size": 1, "digest": f"git:{COMMIT}"}})
    assert resolve._key(taken()) != one


def fetched(found: Config, folder: Path) -> None:
    """Do the job that fetches the checkpoint, as the rules give it."""
    job = fetch.task(
        source=options.section("source", found),
        drafter=None,
        locked=options.locked(found),
        hashes=None,
        before_change=lambda: None,
    )
    job.work({"record": folder / "source.receipt.json"})


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_other_files_than_the_lock_s_are_refused_by_every_reader(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A hub that lists another digest at the same commit, on a machine that knows nothing of it; or an edited lock."""
    locks.keep([taken()])
    hub.files = hub.files | {name: hub.files[name] + b" "}
    default(monkeypatch, hub.endpoint, tmp_path / "other")
    for work in (lambda: fetched(taken(), tmp_path), lambda: resolve._config_folder(taken().source)):
        with pytest.raises(CheckpointError, match=f"{name}: the hub and the lock disagree about this file") as caught:
            work()
        assert "shardmill lock --upgrade" in str(caught.value)
    assert not (tmp_path / "source").exists()


def test_of_two_runs_at_once_the_second_is_refused(hub: Hub) -> None:
    """Both have asked the hub before either wrote; what the first wrote stays."""
    one = taken()
    hub.commit = NEWER
    other = taken()
    locks.keep([one])
    locks.keep([one])  # the same is no quarrel
    text = LOCK.read_text()
    with pytest.raises(ConfigError, match="another run has meanwhile locked"):
        locks.keep([other])
    assert LOCK.read_text() == text


def test_a_lock_of_its_name_in_the_working_folder_is_another_configs(hub: Hub) -> None:
    """Where the config's own folder can be written, its lock lies there."""
    other = {"version": 1, "sources": [{"repo": "acme/other", "revision": "main", "commit": NEWER, "files": {}}]}
    Path("tiny.lock").write_text(json.dumps(other))
    assert locks.relock(config.parse(CONTENT), YAML, upgrade=False).startswith(f"wrote {LOCK}")
    assert json.loads(Path("tiny.lock").read_text()) == other


def test_one_process_at_a_time_writes(hub: Hub) -> None:
    """Two that add a repository each would lose the first one's."""
    found = taken()
    folder = os.open(LOCK.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    writing = threading.Thread(target=locks.keep, args=([found],))
    writing.start()
    asked = f":{os.stat(LOCK.parent).st_ino} "
    waiting = Path("/proc/locks")
    if waiting.exists():  # which names who waits, after an arrow
        wait_until(lambda: LOCK.exists() or re.search(f"->.*{asked}", waiting.read_text()))
    assert not LOCK.exists()
    os.close(folder)
    writing.join()
    assert LOCK.exists()


def test_another_repository_comes_beside(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """A lock of what the config named before, or of a model that has a drafter now."""
    locks.keep([taken()])
    changed(repo="acme/other")
    assert "wrote" in kept(capsys)
    assert sorted(repo for repo, _ in locks.read_lock(LOCK)) == ["acme/other", REPO]


def test_a_drafter_has_its_own_entry(hub: Hub) -> None:
    content = CONTENT | {"drafter": {"repo": REPO, "revision": COMMIT[:-1] + "x"}}
    with pytest.raises(ConfigError, match="has no revision"):
        taken(content)
    found = taken(CONTENT | {"drafter": {"repo": REPO}})
    assert [source.revision for source in found.sources] == [COMMIT, COMMIT]
    pinned = replace(found, drafter=config.parse(CONTENT | {"drafter": {"repo": REPO, "revision": NEWER}}).drafter)
    assert [rows is not None for rows in options.locked(pinned)] == [True, False]


def unwritable(patch: pytest.MonkeyPatch, *folders: str) -> None:
    """Let no file be written in some folders; nothing is tried against modes, which root may ignore."""

    def write(path: Path, content: Any) -> None:
        if str(path.parent) in folders:
            raise OSError(30, "Read-only file system", str(path))
        files.write_json(path, content)

    patch.setattr(locks, "write_json", write)
    patch.setattr(locks.os, "access", lambda folder, mode: str(folder) not in folders)


def test_in_a_read_only_folder_it_lies_in_the_working_folder(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unwritable(monkeypatch, "configs")
    assert "wrote tiny.lock: " in kept(capsys)
    hub.commit = NEWER
    assert taken().source.revision == COMMIT
    unwritable(monkeypatch, ".", "configs")
    Path("tiny.lock").unlink()
    with pytest.raises(ConfigError, match="tiny.lock: can't be written .*write a commit as source.revision"):
        kept(capsys)
    assert not LOCK.exists()


def test_a_lock_that_may_not_be_changed_is_not_passed_by(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the working folder would never be read."""
    locks.keep([taken()])
    changed(repo="acme/other")
    unwritable(monkeypatch, "configs")
    with pytest.raises(ConfigError, match="can't be written"):
        locks.keep([taken()])
    assert not Path("tiny.lock").exists()


@pytest.mark.parametrize("variable", ["CI", "SHARDMILL_LOCKED"])
def test_where_locks_alone_count_no_commit_is_chosen(hub: Hub, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "true")
    said = f"{LOCK}: does not say {REPO} main, and {variable} lets no run choose a commit; run `shardmill lock {YAML}`"
    assert refused() == said and not hub.requests
    monkeypatch.setenv(variable, "false")
    locks.keep([taken()])
    monkeypatch.setenv(variable, "true")
    assert taken().source.revision == COMMIT


def test_a_plan_may_be_told_to_choose_no_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the environment as it was."""
    why = "SHARDMILL_LOCKED lets no run choose a commit"
    said = f"{LOCK}: does not say {REPO} main, and {why}; run `shardmill lock {YAML}`"
    monkeypatch.delenv("SHARDMILL_LOCKED", raising=False)
    monkeypatch.delenv("CI", raising=False)
    YAML.write_text(json.dumps(CONTENT))
    assert failure("plan", "--locked", YAML) == said and not hub.requests
    assert "SHARDMILL_LOCKED" not in os.environ
    monkeypatch.setenv("SHARDMILL_LOCKED", "0")
    with locks.only_locked(True):
        assert refused() == said
    assert os.environ["SHARDMILL_LOCKED"] == "0"
    with locks.only_locked(False):
        assert taken().source.revision == COMMIT


def test_a_job_asks_no_hub_and_writes_nothing(hub: Hub) -> None:
    assert f"run `shardmill lock {YAML}`, and keep the lock where jobs read" in refused(may_ask=False)
    assert not hub.requests and not LOCK.exists()


@pytest.mark.parametrize(("main", "dry"), [(True, False), (True, True), (False, False)])
def test_only_a_run_that_builds_writes(hub: Hub, capsys: pytest.CaptureFixture[str], main: bool, dry: bool) -> None:
    """A dry run says what it would write while rules are read, so with any target."""
    output = SimpleNamespace(dryrun=dry)
    workflow = SimpleNamespace(is_main_process=main, executor_plugin=object(), dryrun=dry, output_settings=output)
    batch = Batch({"tiny": taken()})
    snakefile.say_unlocked(batch, workflow)
    snakefile.lock(batch, workflow)
    said = capsys.readouterr().err
    assert LOCK.exists() == (main and not dry)
    assert ("wrote" in said, "not locked yet" in said) == (main and not dry, dry)


def test_the_command_keeps_what_is_locked_unless_it_upgrades(hub: Hub) -> None:
    assert shardmill("lock", YAML).output == f"wrote {LOCK}: {REPO} main at {COMMIT[:7]}\n"
    hub.commit = NEWER
    assert f"holds {REPO} main at {COMMIT[:7]}" in shardmill("lock", YAML).output
    assert shardmill("lock", "--upgrade", YAML).output == f"wrote {LOCK}: {REPO} main at {NEWER[:7]}\n"
    changed(repo="acme/other")
    assert "wrote" in shardmill("lock", YAML).output
    assert {repo for repo, _ in locks.read_lock(LOCK)} == {REPO}
    LOCK.write_text("")
    assert "damaged" in failure("lock", YAML)
    assert "wrote" in shardmill("lock", "--upgrade", YAML).output
    YAML.write_text(json.dumps({**CONTENT, "source": {"repo": REPO, "revision": COMMIT}}))
    assert "needs no lock, its source is a pinned commit" in shardmill("lock", YAML).output


def test_a_lock_is_found_by_the_file_that_names_the_source(hub: Hub) -> None:
    contents = {"a.yaml": {"source": {}}, "b.yaml": {"source": {}}, "c.yaml": {"context": 8}, "d.yaml": None}
    assert snakefile._file_with_source(contents) == Path("b.yaml")
    assert locks.lock_of(None, "tiny") == Path("tiny.lock")
    assert locks.lock_path(replace(taken())) == LOCK


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no such repository": ({"statuses": [404]}, "answered 404"),
    "401": ({"statuses": [401]}, "refused the token (401)"),
    "403": ({"statuses": [403]}, "forbids access (403)"),
    "renamed": ({"renamed": "acme/new"}, "acme/tiny: is called acme/new now; write that name"),
    "busy for good": ({"statuses": [503] * 99}, "answered 503 again and again for "),
    "asks for an hour": ({"retry_after": "3600"}, "asks to wait longer than 60 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_hub_refuses_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A final answer is asked for once; a busy hub for at most a minute in all."""
    waits: list[float] = []
    monkeypatch.setattr("shardmill.checkpoint.hub_limits.time.sleep", waits.append)
    changes, said = FAULTS[fault]
    for name, value in changes.items():
        setattr(hub, name, value)
    assert said in refused()
    assert sum(waits) <= 60 and (len(hub.requests) == 1) == (fault != "busy for good")
    assert not LOCK.exists()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_hub_is_asked_again_and_said_to_be(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("shardmill.checkpoint.hub_limits.time.sleep", waits.append)
    hub.statuses = [status] * 3
    assert taken().source.revision == COMMIT
    assert waits == [1, 2, 4]
    assert [record.message for record in caplog.records if record.name.startswith("shardmill")] == [
        f"127.0.0.1 answered {status}: it is asked again, for at most 60 s"
    ]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_what_writes_is_sent_once(hub: Hub, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A second commit would be another one, and a file's second upload would begin at its end."""
    monkeypatch.setattr("shardmill.checkpoint.hub_limits.time.sleep", lambda _: pytest.fail("waits"))
    hub.statuses = [503] * 2
    with hub_limits._Client() as asking:
        assert asking.request(method, f"{hub.endpoint}/api/repos/create").status_code == 503


def test_a_hub_that_is_not_there_is_asked_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.checkpoint.hub_limits._answered", set[str]())
    monkeypatch.setattr("shardmill.checkpoint.hub_limits.time.sleep", lambda _: pytest.fail("waits"))
    default(monkeypatch, "http://127.0.0.1:9", Path("hub"))
    assert "127.0.0.1: can't be reached; connect to a network" in refused()
