"""`shardmill verify`: every file of a build is the one that is recorded, or is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.errors import ShardmillError
from shardmill.files import read_json, sealed, write_json
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action
from shardmill.records.attest import with_seal
from shardmill.records.audit import audit, is_out_of_scope

from . import made

BUNDLE = "compiled/head_0.mlmodelc"
TABLE = 4  # lines that say what is proved by whom, where no key is given


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return made.finish(tmp_path / "build")


def verify(build: Path) -> tuple[int, str]:
    """Exit code, and what a person reads."""
    said = CliRunner().invoke(app, ["verify", str(build)])
    return said.exit_code, said.output


def test_a_build_that_nobody_touched_is_right(build: Path) -> None:
    found = audit(build)
    files = [path for path in build.rglob("*") if path.is_file()]
    assert (found.wrong, found.unchecked) == ((), 1 + 2 * len(made.PARTS))  # a log, and a mark in each folder
    assert found.checked + found.unchecked == len(files) > 20
    code, text = verify(build)
    assert code == 0 and f"{found.checked} files checked, 0 wrong; 5 logs and marks" in text
    assert made.hash_file(build / "provenance.json") in text


def test_what_only_the_report_shows_is_known_by_receipts_of_its_own(build: Path) -> None:
    point = build / "measured/chosen.json"
    Store(build.parent / ".store").perform(
        Action("measured"), {"figures": point}, made.receipt(point), lambda outputs: made.make_file(outputs["figures"])
    )
    assert audit(build).wrong == ()
    point.chmod(0o644)
    point.write_text("other")
    assert dict(audit(build).wrong) == {"measured/chosen.json": "not the bytes that measured/chosen.receipt.json names"}
    made.receipt(point).unlink()
    assert dict(audit(build).wrong) == {"measured/chosen.json": "not a part of the build: no record names it"}


@pytest.mark.thorough
def test_any_bit_of_any_file_counts(build: Path) -> None:
    """Each damaged file is named, or what names it is: a record that is damaged can't speak for others."""
    for path in sorted(build.rglob("*")):
        name = path.relative_to(build).as_posix()
        if not path.is_file() or is_out_of_scope(name):
            continue
        content, mode = path.read_bytes(), path.stat().st_mode
        path.chmod(0o644)
        for at in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            code, text = verify(build)
            assert (code, name in text) == (1, True), (name, at, text)
        path.write_bytes(content)
        path.chmod(mode)
    assert audit(build).wrong == ()


@pytest.mark.thorough(but=["provenance.json", "model.json"])
@pytest.mark.parametrize("name", ["provenance.json", "report.receipt.json", "model.json"])
def test_every_bit_of_the_records_counts(build: Path, name: str) -> None:
    """They vouch for all else, so there is no bit in them that means nothing."""
    path = build / name
    content = path.read_bytes()
    for at in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 7]) + content[at + 1 :])
        try:
            wrong = [path for path, _ in audit(build).wrong]
        except ShardmillError as error:
            wrong = [Path(str(error).split(":")[0]).name.split(" ")[0]]
        assert name in wrong, at


def linked_bundle(build: Path) -> str:
    shutil.move(build / BUNDLE, build.parent / "elsewhere")
    (build / BUNDLE).symlink_to(build.parent / "elsewhere")
    return f"{BUNDLE}: a link"


def loop(build: Path) -> str:
    (build / BUNDLE / "loop").symlink_to(".")
    return f"{BUNDLE}/loop: a link"


def dangling(build: Path) -> str:
    (build / "dangling").symlink_to("nowhere")
    return "dangling: a link"


def linked_file(build: Path) -> str:
    file = build / BUNDLE / "inner/data"
    shutil.move(file, build.parent / "data")
    file.symlink_to(build.parent / "data")
    return f"{BUNDLE}/inner/data: a link"


def fifo(build: Path) -> str:
    os.mkfifo(build / "source/fifo")
    return "source/fifo: neither a file nor a folder"


def fifo_for_a_file(build: Path) -> str:
    (build / "embedding.safetensors").unlink()
    os.mkfifo(build / "embedding.safetensors")
    return "embedding.safetensors: neither a file nor a folder"


def template(build: Path) -> str:
    (build / "source/chat_template.jinja").write_text("{{1}}")
    return "source/chat_template.jinja: not a part of the build"


def more_in_a_bundle(build: Path) -> str:
    (build / BUNDLE / "inner/more").touch()
    return f"{BUNDLE}/inner/more: not a part of the build"


def failed_gate(build: Path) -> str:
    (build / "parity/stack.failed.json").touch()
    return "parity/stack.failed.json: not a part of the build"


def receipt_for_itself(build: Path) -> str:
    """A record that nothing vouches for vouches for nothing."""
    (build / "evil.html").touch()
    content = {"outputs": {"page": made.hash_file(build / "evil.html")}, "paths": {"page": "evil.html"}}
    write_json(build / "evil.receipt.json", sealed(content))
    return "evil.html: not a part of the build"


def gone(build: Path) -> str:
    (build / "source/model.safetensors").unlink()
    return "source/model.safetensors: missing"


def escapes(build: Path) -> str:
    (build / "\x1b[31m").touch()
    return "?[31m: not a part of the build"


FAULTS = [linked_bundle, loop, dangling, linked_file, fifo, fifo_for_a_file, template, more_in_a_bundle, failed_gate]
FAULTS += [receipt_for_itself, gone, escapes]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_not_as_it_was_built_is_named(build: Path, fault: Callable[[Path], str]) -> None:
    expected = fault(build)
    code, text = verify(build)
    assert (code, expected in text) == (1, True), text
    assert len(text.splitlines()) <= 5 + TABLE


LEFT_BY_MACOS = [".DS_Store", "._model.json", f"{BUNDLE}/inner/.DS_Store", "attestations/.DS_Store"]
LEFT_BY_MACOS += ["measured/._chosen.receipt.json", "evidence/._a.json", "source/._config.json"]


def test_what_macos_leaves_in_folders_is_let_be(build: Path) -> None:
    """The Finder does in every folder that it shows, and every program of a Mac on a disk of another system."""
    before = audit(build)
    for name in LEFT_BY_MACOS:
        (build / name).parent.mkdir(exist_ok=True)
        (build / name).write_bytes(b"\0\5\x16\7")
    found = audit(build)
    assert found == replace(before, unchecked=before.unchecked + len(LEFT_BY_MACOS))
    assert verify(build)[0] == 0


@pytest.mark.parametrize("name", [".DS_Store", "._model.json"])
def test_a_link_is_wrong_whatever_it_is_called(build: Path, name: str) -> None:
    (build / name).symlink_to("/etc/passwd")
    assert audit(build).wrong == ((name, "a link"),)


GIT_AND_HUB = [".gitattributes", ".git/config", ".git/objects/ab/cd", ".cache/huggingface/download/model.json.metadata"]


def test_what_git_and_the_hub_put_beside_a_build_is_let_be(build: Path) -> None:
    """A build that came by `git clone` or `hf download` is as good as one that came by `shardmill pull`."""
    before = audit(build).unchecked
    for name in GIT_AND_HUB:
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).write_text("x")
    code, text = verify(build)
    assert code == 0 and audit(build).unchecked == before + len(GIT_AND_HUB)
    assert f"{before + len(GIT_AND_HUB)} logs and marks of Snakemake, macOS, git and the hub not checked" in text


@pytest.mark.parametrize("name", ["source/.gitattributes", ".gitattributes2", ".cache/other", "source/.git/config"])
def test_other_names_of_that_kind_are_strangers(build: Path, name: str) -> None:
    (build / name).parent.mkdir(parents=True, exist_ok=True)
    (build / name).write_text("x")
    assert dict(audit(build).wrong) == {name: "not a part of the build: no record names it"}


def test_a_file_that_a_record_names_is_checked_whatever_it_is_called(build: Path) -> None:
    (build / "benchmark/._a").write_text("other")
    write_json(build / "benchmark/speed.receipt.json", sealed({"outputs": {"a": "0" * 64}, "paths": {"a": "._a"}}))
    assert ("benchmark/._a", "not the bytes that benchmark/speed.receipt.json names") in audit(build).wrong


def test_a_bundle_that_is_a_link_is_named_once(build: Path) -> None:
    """Not as each of the files in it, too."""
    linked_bundle(build)
    assert audit(build).wrong == ((BUNDLE, "a link"),)


def test_weights_that_were_fetched_as_a_link_are_followed(build: Path) -> None:
    """Across file systems there are no hard links; the bytes count all the same."""
    weights = build / "source/model.safetensors"
    shutil.move(weights, build.parent / "weights")
    weights.symlink_to(build.parent / "weights")
    assert audit(build).wrong == ()
    (build.parent / "weights").write_text("wx")
    assert audit(build).wrong == (("source/model.safetensors", "not the bytes that provenance.json names"),)


def test_a_benchmark_measured_anew_is_right_once_it_is_drawn(build: Path) -> None:
    """`shardmill bench` writes over the figures of the build."""
    (build / "benchmark/speed.json").write_text("quicker")
    assert audit(build).wrong == (("benchmark/speed.json", "not the bytes that report.receipt.json names"),)
    drawn = read_json(build / "report.receipt.json")
    drawn["outputs"]["speed"] = made.hash_file(build / "benchmark/speed.json")
    write_json(build / "report.receipt.json", sealed(drawn))
    assert audit(build).wrong == ()


def test_a_benchmark_that_was_not_drawn_yet_is_right(build: Path) -> None:
    for name in ("report.html", "report.receipt.json"):
        (build / name).unlink()
    assert audit(build).wrong == ()


def test_what_would_fill_the_screen_is_counted(build: Path) -> None:
    for number in range(30):
        (build / f"file {number}").touch()
    code, text = verify(build)
    assert (code, "... and 10 more" in text, "30 wrong" in text) == (1, True, True)
    assert len(text.splitlines()) == 24 + TABLE


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"subject": 5}', "absent"], ids=lambda c: c[:9])
def test_without_an_attestation_nothing_can_be_compared(build: Path, content: str) -> None:
    file = build / "provenance.json"
    file.unlink()
    if content != "absent":
        file.write_text(content)
    with pytest.raises(ShardmillError, match=r"provenance\.json: can't be read .*; remove it and build again"):
        audit(build)
    write_json(file, with_seal({"subject": [5], "predicate": {"buildDefinition": {"internalParameters": {}}}}))
    with pytest.raises(ShardmillError, match="no attestation of a build"):
        audit(build)


def test_a_damaged_receipt_is_not_attested(build: Path) -> None:
    """Else the attestation would vouch for the damage."""
    receipt = build / "parity/stack.receipt.json"
    receipt.write_text(receipt.read_text().replace("stack", "stick"))
    with pytest.raises(ShardmillError, match="stack.receipt.json: can't be read"):
        made.attest(build)


def test_evidence_of_a_device_is_a_part_of_the_build_while_nobody_changes_it(build: Path) -> None:
    file = build / "evidence/apple-m4.json"
    write_json(file, sealed({"kind": "whatever was measured"}))
    assert audit(build).wrong == ()
    file.write_text(file.read_text().replace("whatever", "whatsoever"))
    assert audit(build).wrong == (("evidence/apple-m4.json", "not a part of the build: no record names it"),)
