"""`shardmill publish` and `pull`, by the real huggingface_hub client against a hub of the tests' own."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from patience import PATIENCE
from pipeline import made
from processes import failure, succeeded

from shardmill.checkpoint import hashing
from shardmill.checkpoint.hub_listing import HubAccess
from shardmill.errors import ShardmillError
from shardmill.files import read_json
from shardmill.release.publish import PublishOptions, prepare_upload, upload
from shardmill.release.publishable import check_leaks
from shardmill.release.pull import Address, address, local_build, pull
from shardmill.release.sign import signed_files

from .signed import Keys, model_signing, run
from .store_hub import LFS, StoreHub, running

REPO = "acme/tiny-ane"
WISH = PublishOptions(REPO, license="apache-2.0")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StoreHub]:
    with running() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        access = HubAccess
        fields = (hub.endpoint, tmp_path / "hub", None)
        monkeypatch.setattr(access.__init__, "__defaults__", fields)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield hub


def publish(build: Path, wish: PublishOptions = WISH) -> str:
    return upload(build, prepare_upload(build, wish), wish)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_what_was_published_is_pulled_byte_for_byte(build: Path, keys: Keys, hub: StoreHub, tmp_path: Path) -> None:
    wish = PublishOptions(REPO, license="apache-2.0", key=keys.private)
    files = prepare_upload(build, wish)
    commit = upload(build, files, wish)
    pulled = pull(Address(REPO, commit), tmp_path / "pulled")
    assert contents(pulled) == {name: (build / name).read_bytes() for name in files}
    code, text = run("verify", pulled, "--key", keys.public)
    assert (code, "0 wrong" in text) == (0, True), text
    succeeded(model_signing(pulled, keys.public))


def test_a_repository_looks_as_hubs_and_people_know_them(build: Path, keys: Keys, hub: StoreHub) -> None:
    publish(build, PublishOptions(REPO, license="apache-2.0", key=keys.private))
    files = hub.files(REPO)
    assert files is not None
    wanted = {"README.md", "config.json", "tokenizer.json", "model.json", "embedding.safetensors", "report.html"}
    wanted |= {"model.sig", "attestations/provenance.dsse.jsonl", "attestations/test-results.dsse.jsonl"}
    wanted |= {f"{step}/inner/data" for step in ("compiled/head_0.mlmodelc", "packages/head_0.mlpackage")}
    assert wanted <= files.keys()
    unwanted = ("snakemake", "logs/", "reference.safetensors", ".receipt.json.")
    assert [name for name in files for part in unwanted if part in name or name.endswith("model.safetensors")] == []


@pytest.mark.thorough
def test_what_macos_leaves_in_folders_is_neither_signed_nor_uploaded(build: Path, keys: Keys, hub: StoreHub) -> None:
    publish(build, PublishOptions(REPO, license="apache-2.0", key=keys.private))
    before = hub.files(REPO)
    for folder in (build, build / "attestations", build / "compiled/head_0.mlmodelc"):
        (folder / ".DS_Store").touch()
        (folder / "._model.sig").touch()
    publish(build, PublishOptions(REPO, license="apache-2.0", key=keys.private))
    after = hub.files(REPO)
    assert before is not None and after is not None and after.keys() == before.keys()
    assert not {name for name in signed_files(build) if "/." in f"/{name}"}


def test_nothing_published_names_the_machine(build: Path, hub: StoreHub) -> None:
    publish(build)
    told = [str(build), str(Path.cwd()), f"{Path.home()}/", socket.gethostname() + "/"]
    for name, content in (hub.files(REPO) or {}).items():
        for word in told:
            assert word.encode() not in content, (name, word)


@pytest.mark.thorough(but=["model-coreml"])
@pytest.mark.parametrize(("host", "account"), [("model", "coreml"), ("head", "license"), ("packages", "tiny")])
def test_names_that_are_words_of_every_build_are_no_leak(
    build: Path, hub: StoreHub, host: str, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(getpass, "getuser", lambda: account)
    publish(build)
    (build / "parity/head_0.json").write_text(f"by me@{host}")
    with pytest.raises(ShardmillError, match="names this machine"):
        check_leaks(build, ["parity/head_0.json"])


def test_the_card_passes_the_hub_client_s_own_validation(build: Path, hub: StoreHub, keys: Keys) -> None:
    publish(build, PublishOptions(REPO, license="apache-2.0", key=keys.private))
    card = ModelCard.load(build / "README.md")
    again = huggingface_hub.ModelCardData(**card.data.to_dict(), ignore_metadata_errors=False)
    assert again.to_dict() == card.data.to_dict()
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "text-generation")
    assert {"coreml", "apple-neural-engine"} <= set(card.data.tags)
    assert card.data.eval_results is not None
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results == {"kl_divergence": 0.001, "accuracy": 1.0, "perplexity_ratio": 1.001}
    text = made.hash_file(build.parent / "parity.txt")
    assert {result.dataset_revision for result in card.data.eval_results} == {text}
    for words in (f"hf:{REPO}", "**predicted**", keys.known.short, "`width_error_fp16`", "shardmill rebuild", "SLSA"):
        assert words in card.text, words


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("task", "command"),
    [("token-classification", "label"), ("text-ranking", "serve"), ("feature-extraction", "serve")],
)
def test_the_card_of_an_encoder_says_how_to_use_it(
    build: Path, monkeypatch: pytest.MonkeyPatch, task: str, command: str
) -> None:
    model = read_json(build / "model.json")
    model["parts"][0]["kind"] = "encoder"
    added = {"task": task, "labels": [] if task == "feature-extraction" else ["O"]}
    monkeypatch.setattr("shardmill.release.publish.read_manifest", lambda *_: model | added)
    prepare_upload(build, WISH)
    card = ModelCard.load(build / "README.md")
    assert card.data.pipeline_tag == task
    assert f"shardmill {command} hf:" in card.text and "shardmill generate" not in card.text


def test_a_card_names_the_base_model(build: Path, hub: StoreHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("acme/tiny", {"README.md": b""})
    hub.cards["acme/tiny"] = {"license": "other", "license_name": "acme-1", "license_link": "https://acme.example"}
    source = {"repo": "acme/tiny", "revision": hub.repos["acme/tiny"][0][0]}
    monkeypatch.setitem(made.SETTINGS, "source", source)
    made.attest(build)
    with pytest.raises(ShardmillError, match="license other is not known to allow changed copies"):
        prepare_upload(build, PublishOptions(REPO))
    prepare_upload(build, PublishOptions(REPO, may=True))
    data = ModelCard.load(build / "README.md").data
    assert (data.base_model, data.to_dict()["base_model_relation"]) == ("acme/tiny", "quantized")
    assert (data.license, data.license_name, data.license_link) == ("other", "acme-1", "https://acme.example")


def test_a_license_that_nobody_knows_must_be_said(build: Path) -> None:
    code, text = run("publish", build, REPO, "--dry-run")
    assert (code, "say it with --license" in text) == (1, True)


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "hf:a/b", "a/b@main", "../x", "a/b--c", "a/", f"a/{'b' * 97}", "a/b\x1b[31m"]
)
def test_a_name_that_no_repository_has_is_refused_before_anything_is_written(build: Path, name: str) -> None:
    with pytest.raises(ShardmillError, match="not a name for a repository; write OWNER/NAME"):
        prepare_upload(build, PublishOptions(name, license="mit"))
    assert not (build / "README.md").exists()


def test_a_dry_run_sends_nothing_and_writes_nothing(build: Path, keys: Keys, hub: StoreHub) -> None:
    """The card is shown, since a person reads it before it is published."""
    before = contents(build.parent)
    code, text = run("publish", build, REPO, "--dry-run", "--license", "mit", "--key", keys.private)
    assert (code, "would be uploaded" in text, "compiled/head_0.mlmodelc/inner/data" in text) == (0, True, True), text
    assert "license: mit" in text and keys.known.short in text
    assert (hub.repos, hub.put) == ({}, [])
    assert contents(build.parent) == before


def test_what_a_dry_run_refuses_is_named_where_it_lies(build: Path) -> None:
    (build / "compiled/head_0.mlmodelc/inner/data").write_text("other")
    code, text = run("publish", build, REPO, "--dry-run", "--license", "mit")
    assert (code, text.startswith(f"shardmill: {build}/compiled/head_0.mlmodelc/inner/data: not the bytes")) == (
        1,
        True,
    )


@pytest.mark.thorough
def test_a_private_repository_is_private(build: Path, hub: StoreHub) -> None:
    publish(build, PublishOptions(REPO, license="mit", private=True))
    assert hub.private == {REPO}
    publish(build, PublishOptions(REPO, license="mit", private=True))
    publish(build, PublishOptions(REPO, license="mit"))
    assert hub.private == {REPO}


def test_nothing_goes_to_a_public_repository_that_was_to_be_private(build: Path, hub: StoreHub) -> None:
    hub.commit(REPO, {".gitattributes": b""})
    code, text = run("publish", build, REPO, "--license", "mit", "--private")
    assert (code, text.strip().splitlines()[-1:]) == (
        1,
        [f"shardmill: {REPO}: exists already and is public; make it private there, or name another"],
    )
    assert (hub.put, hub.files(REPO)) == ([], {".gitattributes": b""})


@pytest.mark.thorough
@pytest.mark.parametrize("include", ["packages", "compiled"])
def test_one_form_of_the_programs_is_enough(
    build: Path, keys: Keys, hub: StoreHub, tmp_path: Path, include: str
) -> None:
    publish(build, PublishOptions(REPO, license="mit", include=include, key=keys.private))  # type: ignore[arg-type]
    pulled = pull(Address(REPO, None), tmp_path / "pulled")
    assert [name for name in ("packages", "compiled") if (pulled / name).exists()] == [include]
    assert run("verify", pulled, "--key", keys.public)[0] == 0


def test_what_was_signed_is_not_cut_without_the_key(build: Path, keys: Keys) -> None:
    assert run("sign", build, "--key", keys.private)[0] == 0
    with pytest.raises(ShardmillError, match="give --key to sign it anew"):
        prepare_upload(build, PublishOptions(REPO, license="mit", include="packages"))


@pytest.mark.thorough
def test_what_was_signed_before_is_published_without_the_key(
    build: Path, keys: Keys, hub: StoreHub, tmp_path: Path
) -> None:
    assert run("sign", build, "--key", keys.private)[0] == 0
    publish(build)
    pulled = pull(Address(REPO, None), tmp_path / "pulled")
    assert run("verify", pulled, "--key", keys.public)[0] == 0
    succeeded(model_signing(pulled, keys.public))
    assert keys.known.short in (pulled / "README.md").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("change", [("other/model", "mit"), (REPO, "apache-2.0")])
@pytest.mark.parametrize("dry", [True, False])
def test_a_signed_card_is_not_rewritten_without_the_key(
    build: Path, keys: Keys, hub: StoreHub, change: tuple[str, str], dry: bool
) -> None:
    """Readers would find a signature that does not hold; the build itself would be broken as well."""
    publish(build, PublishOptions(REPO, license="mit", key=keys.private))
    there = dict(hub.files(REPO))
    repo, license = change
    code, text = run("publish", build, repo, "--license", license, *(["--dry-run"] if dry else []))
    assert (code, "was signed for another repository or license" in text, "--key" in text) == (1, True, True), text
    assert run("verify", build, "--key", keys.public)[0] == 0
    assert hub.files(REPO) == there and [*hub.repos] == [REPO]


@pytest.mark.thorough
def test_a_signed_card_is_published_again_as_it_is(build: Path, keys: Keys, hub: StoreHub, tmp_path: Path) -> None:
    publish(build, PublishOptions(REPO, license="mit", key=keys.private))
    assert run("publish", build, REPO, "--license", "mit")[0] == 0
    assert run("verify", pull(Address(REPO, None), tmp_path / "pulled"), "--key", keys.public)[0] == 0
    assert run("publish", build, "other/model", "--license", "mit", "--key", keys.private)[0] == 0
    assert run("verify", pull(Address("other/model", None), tmp_path / "other"), "--key", keys.public)[0] == 0


def test_a_build_that_is_wrong_is_not_published(build: Path, hub: StoreHub) -> None:
    (build / "compiled/head_0.mlmodelc/more").touch()
    code, text = run("publish", build, REPO, "--license", "mit")
    assert (code, "compiled/head_0.mlmodelc/more: not a part of the build" in text) == (1, True), text
    assert hub.repos == {}


@pytest.mark.thorough
def test_the_next_version_takes_the_place_of_all_files(build: Path, hub: StoreHub, tmp_path: Path) -> None:
    first = publish(build)
    hub.repos[REPO].append(("b" * 40, {**(hub.files(REPO) or {}), "stale.bin": b"stale"}))
    publish(build)
    assert "stale.bin" not in (hub.files(REPO) or {}) and ".gitattributes" in (hub.files(REPO) or {})
    assert contents(pull(Address(REPO, first), tmp_path / "a")) == contents(pull(Address(REPO, None), tmp_path / "b"))


def test_somebody_s_own_repository_is_left_alone(build: Path, hub: StoreHub) -> None:
    own = {".gitattributes": b"", "README.md": b"mine", "weights.bin": b"years of work"}
    hub.commit(REPO, own)
    code, text = run("publish", build, REPO, "--license", "mit")
    assert (code, len(text.strip().splitlines())) == (1, 1), text
    assert f"{REPO}: exists already and is not a build" in text and "would remove its weights.bin" in text
    assert (hub.put, hub.files(REPO)) == ([], own)


@pytest.mark.thorough
def test_a_repository_with_a_part_of_the_build_is_gone_on_with(build: Path, hub: StoreHub) -> None:
    """So it is after a break, where the client commits in several pieces."""
    files = prepare_upload(build, WISH)
    hub.commit(REPO, {"README.md": b"", files[-1]: (build / files[-1]).read_bytes()})
    upload(build, files, WISH)
    assert {*files} == {*(hub.files(REPO) or {})}


COMMAND = """
from huggingface_hub import constants
from shardmill.cli import main
main()
"""


def started(build: Path, hub: StoreHub) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "token"}
    command = [sys.executable, "-c", COMMAND, "publish", str(build), REPO, "--license", "mit"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.mark.thorough
def test_an_upload_that_was_killed_twice_goes_on(build: Path, hub: StoreHub, tmp_path: Path) -> None:
    arrived: list[set[str]] = []
    for stall in (1, 2):
        hub.stall_at = stall
        hub.stalled.clear()
        process = started(build, hub)
        assert hub.stalled.wait(PATIENCE), process.communicate()[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert hub.files(REPO) == {".gitattributes": b"*.bin filter=lfs\n"}
        arrived.append(set(hub.put))
        hub.put.clear()
    hub.stall_at = None
    process = started(build, hub)
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, failure(process.args, process.returncode, said)
    arrived.append(set(hub.put))
    assert all(arrived) and not any(set.intersection(*pair) for pair in combinations(arrived, 2))  # nothing twice
    assert said.strip().endswith(f"hf:{REPO}@{hub.repos[REPO][-1][0]}")
    assert pull(Address(REPO, None), tmp_path / "pulled").is_dir()


@pytest.mark.parametrize(
    ("status", "said"), [(401, "refused the token"), (403, "rights to write"), (400, "answered 400")]
)
def test_a_hub_that_refuses_is_one_line(build: Path, hub: StoreHub, status: int, said: str) -> None:
    hub.answer = status
    code, text = run("publish", build, REPO, "--license", "mit")
    assert code == 1 and said in text and len(text.strip().splitlines()) == 1, text


def test_a_hub_can_not_keep_an_upload_waiting_for_an_hour(build: Path, hub: StoreHub) -> None:
    """Its client would obey in silence, five times."""
    hub.answer, hub.retry_after = 429, "3600"
    code, text = run("publish", build, REPO, "--license", "mit")
    assert code == 1 and "429 and asks to wait longer than 60 s" in text and len(text.strip().splitlines()) == 1, text


def tampered(hub: StoreHub, name: str, content: bytes) -> str:
    return hub.commit(REPO, {**(hub.files(REPO) or {}), name: content})


@pytest.mark.thorough(but=["README.md"])
@pytest.mark.parametrize("name", ["compiled/head_0.mlmodelc/inner/data", "model.json", "evil.json", "README.md"])
def test_what_was_tampered_with_on_the_hub_is_named(build: Path, hub: StoreHub, tmp_path: Path, name: str) -> None:
    publish(build)
    commit = tampered(hub, name, b"{}")
    with pytest.raises(ShardmillError, match=name.replace(".", r"\.")) as raised:
        pull(Address(REPO, commit), tmp_path / "pulled")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "pulled").exists()


@pytest.mark.thorough
def test_every_command_takes_the_address_of_a_published_build(build: Path, hub: StoreHub) -> None:
    commit = publish(build)
    code, text = run("verify", f"hf:{REPO}")
    assert (code, "0 wrong" in text) == (0, True), text
    code, text = run("pull", f"{REPO}@{commit}")
    assert code == 0 and (Path(text.strip()) / "model.json").is_file()
    code, text = run("audit-range", "hf:acme/nowhere", "--prompts", build / "model.json")
    assert code == 1 and "acme/nowhere: no such model" in text


@pytest.mark.thorough
def test_a_second_command_reads_no_file_of_a_published_build_again_but_what_has_changed(
    build: Path, hub: StoreHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of 70 GB would read 70 GB before it loads them, at every start."""
    monkeypatch.setattr("shardmill.checkpoint.cache.RACY_NS", 0)  # as if it had been pulled a while ago
    publish(build)
    target = local_build(f"hf:{REPO}")
    local_build(f"hf:{REPO}")
    reads: list[str] = []
    digest = hashing._digest_span
    monkeypatch.setattr(hashing, "_digest_span", lambda path, span: reads.append(str(path)) or digest(path, span))
    assert local_build(f"hf:{REPO}") == target
    assert [path for path in reads if path.endswith(LFS)] == []
    weights = next(target.rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ShardmillError, match=weights.name):
        local_build(f"hf:{REPO}")


def test_a_folder_that_is_in_use_is_left_alone(build: Path, hub: StoreHub, tmp_path: Path) -> None:
    publish(build)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    with pytest.raises(ShardmillError, match="mine: is not empty"):
        pull(Address(REPO, None), tmp_path / "mine")


def test_addresses_are_read_strictly() -> None:
    assert address("hf:a/b") == address("a/b") == Address("a/b", None)
    assert address("hf:a/b@v1.0") == Address("a/b", "v1.0")
    for text in ("hf:a", "hf:a/b/c", "hf:", "hf:a/b@", "hf:a b/c", "hf:a/b@x y"):
        with pytest.raises(ShardmillError, match="not the address of a published build"):
            address(text)


def test_the_record_of_a_bundle_says_what_stayed_behind(build: Path) -> None:
    prepare_upload(build, WISH)
    assert read_json(build / "bundle.json")["left_out"] == ["source/model.safetensors"]
