"""`shardmill rebuild`: the same bytes come out again and a second signature says so, or what differs is explained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from patience import BUILDING
from pipeline import made
from pipeline.project import ROOT
from pipeline.undisturbed import undisturbed
from processes import succeeded

from shardmill.errors import ShardmillError
from shardmill.files import read_json, sealed, write_json
from shardmill.machine import public_version
from shardmill.pipeline.code_digest import tools
from shardmill.pipeline.needs import STEPS
from shardmill.records.attest import with_seal
from shardmill.release import rebuild
from shardmill.release.compare import explain_difference
from shardmill.release.rebuild import check_tools, compare_rebuilt, read_original, state
from shardmill.release.sign import sign_build

from .signed import Keys, run

pytestmark = pytest.mark.slow


def changed(build: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a build's provenance in which something is otherwise, with its seal."""
    content = read_json(build / "provenance.json")
    change(content)
    copy = build.parent / "other.json"
    write_json(copy, with_seal(content))
    return copy


def dependency(content: dict[str, Any], name: str) -> dict[str, Any]:
    rows = content["predicate"]["buildDefinition"]["resolvedDependencies"]
    return next(row for row in rows if row["name"] == name)  # type: ignore[no-any-return]


def test_a_package_of_another_version_is_refused_with_the_remedy(build: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        dependency(content, "numpy")["uri"] = "pkg:pypi/numpy@1.0"
        dependency(content, "torch")["uri"] = "pkg:pypi/torch@2.0%2Bcu130"

    with pytest.raises(
        ShardmillError, match=r"here: numpy [\d.]+, torch [\d.]+(\+\w+)?; pip install numpy==1.0 torch==2.0$"
    ):
        check_tools(read_original(changed(build, change)))


@pytest.mark.parametrize("torch_build", ["", "%2Bcpu", "%2Bcu130"])
def test_what_decides_no_bytes_is_not_asked_for(build: Path, torch_build: str) -> None:
    """PyPI's torch for Linux brings CUDA's libraries, and no other torch does."""

    def change(content: dict[str, Any]) -> None:
        rows = content["predicate"]["buildDefinition"]["resolvedDependencies"]
        rows += [{"name": name, "uri": f"pkg:pypi/{name}@13.0"} for name in ("nvidia-cublas", "cuda-toolkit", "triton")]
        dependency(content, "rich")["uri"] = "pkg:pypi/rich@2.0"
        public = public_version(version("torch"))
        dependency(content, "torch")["uri"] = f"pkg:pypi/torch@{public}{torch_build}"
        content["predicate"]["buildDefinition"]["internalParameters"]["steps"] = {
            "embedding": {"step": "embedding", "code": tools(STEPS["embedding"], "")["code"]}
        }

    check_tools(read_original(changed(build, change)))


@pytest.mark.parametrize(
    ("digest", "says"),
    [
        ({"gitCommit": "c" * 40}, f"check out shardmill's {'c' * 40}"),
        ({}, "its provenance does not name the commit"),
    ],
)
def test_other_code_is_refused_with_the_commit(build: Path, digest: dict[str, str], says: str) -> None:
    def change(content: dict[str, Any]) -> None:
        steps = content["predicate"]["buildDefinition"]["internalParameters"]["steps"]
        steps["compiled/head_0"] |= {"step": "compile", "code": "0" * 64}
        dependency(content, "workflow")["digest"] = digest

    original = read_original(changed(build, change))
    for name in list(steps := original.definition["internalParameters"]["steps"]):
        if name != "compiled/head_0":
            del steps[name]
    with pytest.raises(ShardmillError, match=f"other code in compile; {says}"):
        check_tools(original)


def test_another_build_type_is_refused(build: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["predicate"]["buildDefinition"]["buildType"] = "https://example.org/other"

    with pytest.raises(ShardmillError, match="of another build type"):
        read_original(changed(build, change))


def test_a_build_that_was_tampered_with_is_named(build: Path) -> None:
    file = build / "packages/head_0.mlpackage/inner/data"
    file.chmod(0o644)
    file.write_text("other")
    with pytest.raises(ShardmillError, match="packages/head_0.mlpackage/inner/data: not the bytes"):
        read_original(build)


def receipt(**changes: Any) -> dict[str, Any]:
    same = {"step": "s", "inputs": {"a": "1"}, "params": {"p": 1}, "code": "c", "packages": {"numpy": "2"}}
    return {**same, "outputs": {"x": "1"}, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"code": "d"}, "one: code differ"),
        ({"packages": {"numpy": "3"}}, "one: packages.numpy differ"),
        ({"params": {"p": 2}, "inputs": {"a": "2"}}, "one: params.p differ"),
        ({"inputs": {"a": "2"}}, "one: other inputs (a)"),
        ({}, "one: other bytes by the same key: another kind of processor, perhaps"),
    ],
)
def test_a_difference_is_explained_by_the_step_and_the_ingredient(changes: dict[str, Any], said: str) -> None:
    before = {"one": receipt(), "same": receipt()}
    after = {"one": receipt(outputs={"x": "2"}, **changes), "same": receipt(code="another, with the same result")}
    assert explain_difference(before, after) == [said]


def test_what_only_follows_comes_last() -> None:
    before = {"a": receipt(), "b": receipt()}
    after = {
        "a": receipt(outputs={"x": "2"}, inputs={"a": "2"}),
        "b": receipt(outputs={"x": "2"}, code="d"),
        "c": receipt(),
    }
    assert explain_difference(before, after) == [
        "b: code differ",
        "c: only one build has this step",
        "a: other inputs (a)",
    ]


def test_every_subject_counts(build: Path, tmp_path: Path) -> None:
    again = made.whole(tmp_path / "again")
    original = read_original(build)
    assert compare_rebuilt(original, again) == []
    verdict = again / "parity/stack.json"
    verdict.chmod(0o644)
    write_json(verdict, {**made.GATES["parity/stack"], "not_run": {"psnr": "no"}})
    row = read_json(again / "parity/stack.receipt.json")
    row["outputs"]["verdict"] = made.hash_file(verdict)
    write_json(again / "parity/stack.receipt.json", sealed(row))
    shutil.rmtree(again / "benchmark")  # which comes after the attestation
    made.attest(again)
    assert compare_rebuilt(original, again) == [
        "parity/stack: other bytes by the same key: another kind of processor, perhaps",
        "parity/stack.json: other bytes",
    ]


def test_who_rebuilds_signs_and_is_counted(build: Path, keys: Keys, others: Keys, tmp_path: Path) -> None:
    sign_build(build, keys.private)
    again = made.finish(tmp_path / "again")
    written = state(again, others.private, build)
    assert [path.name for path in written] == [f"rebuild-{others.known.short}.dsse.jsonl"] * 2
    believed = ("--key", keys.public, "--key", others.public)
    code, text = run("verify", build, *believed)
    assert (code, "by 2 independently" in text) == (0, True), text
    code, text = run("verify", build, "--key", keys.public)
    assert (code, "by 1 independently, 1 not checked" in text) == (0, True), text


def test_who_built_it_does_not_count_twice(build: Path, keys: Keys, tmp_path: Path) -> None:
    sign_build(build, keys.private)
    state(made.finish(tmp_path / "again"), keys.private, build)
    assert "by 1 independently" in run("verify", build, "--key", keys.public)[1]


def test_a_statement_about_other_bytes_is_no_rebuild(build: Path, keys: Keys, others: Keys, tmp_path: Path) -> None:
    sign_build(build, keys.private)
    again = made.finish(tmp_path / "again")

    def change(content: dict[str, Any]) -> None:
        content["subject"][0]["digest"]["sha256"] = "0" * 64

    write_json(again / "provenance.json", read_json(changed(again, change)))
    (_, copy) = state(again, others.private, build)
    code, text = run("verify", build, "--key", keys.public, "--key", others.public)
    assert (code, f"attestations/{copy.name}: is about other bytes" in text) == (1, True), text


def test_a_statement_under_another_s_name_is_refused(build: Path, keys: Keys, others: Keys, tmp_path: Path) -> None:
    sign_build(build, keys.private)
    (_, copy) = state(made.finish(tmp_path / "again"), others.private, build)
    copy.rename(copy.with_name(f"rebuild-{'0' * 16}.dsse.jsonl"))
    code, text = run("verify", build, "--key", keys.public, "--key", others.public)
    assert (code, "not the envelope of the key that its name says" in text) == (1, True), text


def test_a_checkpoint_that_is_another_is_refused(build: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.json").write_text("other")
    original = read_original(build)
    with pytest.raises(ShardmillError, match="folder tiny, which is not here; name its place with --source"):
        rebuild.build_again(original, tmp_path / "out", 1, None)
    with pytest.raises(ShardmillError, match=r"elsewhere/config\.json: not the file of the original build"):
        rebuild.build_again(original, tmp_path / "out", 1, tmp_path / "elsewhere")
    assert not (tmp_path / "out").exists()


def test_a_named_file_that_is_another_is_refused(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe or a calibration text is as much a part of what was built from as the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/parity.txt").write_text("fed")
    (tmp_path / "recipe.json").write_text("other forms")

    def change(content: dict[str, Any]) -> None:
        definition = content["predicate"]["buildDefinition"]
        definition["externalParameters"]["config"]["convert"] = {"precision": "recipe.json"}
        text = dependency(content, "parity.text")  # whose hash the recipe gets
        definition["resolvedDependencies"].append(text | {"name": "convert.precision"})

    original = read_original(changed(build, change))
    with pytest.raises(
        ShardmillError, match=r"recipe\.json: the file that says which form each matrix has is not here"
    ):
        rebuild._named_files(original)
    (tmp_path / "recipe.json").write_text("fed")
    found = {key: file.name for key, file in rebuild._named_files(original).items()}
    assert found == {"parity.text": "parity.txt", "convert.precision": "recipe.json"}


@pytest.mark.parametrize("out", [".", "..", "inside", "/"])
def test_the_original_s_own_folder_is_no_place_for_another(
    build: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There every step would be found done, and the build be compared with itself."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("built"))
    before = sorted(build.rglob("*"))
    with pytest.raises(ShardmillError, match="holds the build that is to be rebuilt; choose another folder"):
        rebuild.build_again(read_original(build), build / out, 1, None)
    assert sorted(build.rglob("*")) == before


def test_nothing_is_taken_from_a_store_that_others_share(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has was made by somebody, maybe by who built the original: it would say nothing of this machine."""
    seen: list[dict[str, str]] = []

    def done(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.append(env)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("SHARDMILL_REMOTE_STORE", "file:///somewhere")
    monkeypatch.setenv("SHARDMILL_REMOTE_STORE_MODE", "read")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr(rebuild, "_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(rebuild, "_named_files", lambda *_: {})
    monkeypatch.setattr(rebuild, "lay_out", Path.mkdir)
    monkeypatch.setattr(subprocess, "run", done)
    rebuild.build_again(read_original(build), tmp_path / "out", 1, None)
    assert seen[0]["KEPT"] == "yes" and not any("REMOTE_STORE" in name for name in seen[0])


def test_model_json_is_told_from_a_damaged_statement(build: Path) -> None:
    with pytest.raises(ShardmillError, match=r"model\.json: does not record how it was built; give the folder"):
        read_original(build / "model.json")


@pytest.mark.pipeline
def test_a_stranger_builds_the_same_bytes(tmp_path: Path, keys: Keys, others: Keys) -> None:
    """With another hash seed, number of cores, locale and time zone; then verify counts two."""
    project = undisturbed(tmp_path / "project")
    shutil.copytree(ROOT / "resources", project.folder / "resources")
    sign_build(project.build, keys.private)
    command = [sys.executable, "-c", "from shardmill.cli import main; main()", "rebuild", str(project.build)]
    other = {"PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--sign", str(others.private), "--cores", "1"],
        cwd=project.folder,
        env=os.environ | project.environment() | other,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILDING,
    )
    succeeded(done)
    assert "0 differing bytes" in done.stdout
    code, text = run("verify", project.build, "--key", keys.public, "--key", others.public)
    assert (code, "by 2 independently" in text) == (0, True), text
