"""Which bundles a machine loads: Core ML only its own of this system, and others compiled again from their packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmill import machine
from shardmill.errors import ShardmillError
from shardmill.files import write_json
from shardmill.runtime import bundles
from shardmill.runtime.bundles import loadable

MAC = {"name": "coreml", "macos": "15.6", "build": "24G84", "chip": "Apple M4"}
PORTABLE = {"name": "portable"}


class Compiler:
    """Stands for Core ML's compiler, and keeps what it compiled."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.error: Exception | None = None

    def __call__(self, package: Path, bundle: Path, functions: Any = ()) -> None:
        if self.error:
            raise self.error
        self.compiled.append(package.name)
        bundle.mkdir()
        (bundle / "model.mil").write_text(" ".join(functions))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """A Mac, whose compiler this is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Compiler()
    monkeypatch.setattr(bundles, "compile_package", found)
    on(monkeypatch, MAC)
    return found


def on(monkeypatch: pytest.MonkeyPatch, engine: dict[str, str]) -> None:
    """The machine that this is."""
    monkeypatch.setattr(machine, "engine", lambda: engine)
    monkeypatch.setattr(machine, "is_portable", lambda: engine["name"] == "portable")


def manifest(root: Path, made_by: dict[str, str] | None, bundle: bool = True, package: bool = True) -> dict[str, Any]:
    """model.json of one part, and its files."""
    for there, path in ((bundle, "compiled/head_0.mlmodelc"), (package, "packages/head_0.mlpackage")):
        if there:
            (root / path).mkdir(parents=True)
    program = {"path": "compiled/head_0.mlmodelc"} | ({"compiler": made_by} if made_by else {})
    packages = {"head_0": {"path": "packages/head_0.mlpackage", "files": {"a": "1"}}}
    return {"parts": [{"name": "head_0", "program": program}], "packages": packages}


def path(found: dict[str, Any]) -> Path:
    return Path(found["parts"][0]["program"]["path"])


@pytest.mark.parametrize("made_by", [MAC, MAC | {"chip": "Apple M1"}])
def test_a_bundle_of_this_system_is_loaded_as_it_is(
    compiler: Compiler, tmp_path: Path, made_by: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert path(loadable(manifest(tmp_path, made_by), tmp_path)) == tmp_path / "compiled/head_0.mlmodelc"
    assert compiler.compiled == [] and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("made_by", "named"),
    [
        (PORTABLE, "the portable compiler"),
        (MAC | {"build": "24G90"}, "macOS 15.6 (24G90)"),
        (MAC | {"macos": "26.0", "build": "25A1"}, "macOS 26.0 (25A1)"),
        (None, "an unknown compiler"),
    ],
)
def test_another_bundle_is_compiled_once_from_its_package_and_a_line_says_so(
    compiler: Compiler,
    tmp_path: Path,
    made_by: dict[str, str] | None,
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = manifest(tmp_path, made_by)
    found = path(loadable(content, tmp_path))
    assert found.name == "head_0.mlmodelc" and found.is_dir() and tmp_path / "cache" in found.parents
    said = capsys.readouterr().err
    assert said == f"shardmill: compiling head_0.mlpackage for this machine: its bundle was compiled by {named}\n"
    assert path(loadable(content, tmp_path)) == found
    assert compiler.compiled == ["head_0.mlpackage"] and capsys.readouterr().err == ""


def test_an_older_build_says_in_its_receipt_who_compiled_it(compiler: Compiler, tmp_path: Path) -> None:
    content = manifest(tmp_path, None)
    write_json(tmp_path / "compiled/head_0.receipt.json", {"engine": MAC})
    assert path(loadable(content, tmp_path)) == tmp_path / "compiled/head_0.mlmodelc"


def test_a_new_system_compiles_anew_and_drops_what_was_for_the_old_one(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = manifest(tmp_path, PORTABLE)
    old = path(loadable(content, tmp_path))
    on(monkeypatch, MAC | {"build": "24G90"})
    new = path(loadable(content, tmp_path))
    assert new != old and new.is_dir() and not old.exists()
    assert [file.name for file in new.parents[1].iterdir()] == [new.parent.name]


@pytest.mark.parametrize("engine", [MAC, PORTABLE])
def test_a_build_that_brings_packages_only_is_compiled_on_any_machine(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, str]
) -> None:
    on(monkeypatch, engine)
    content = manifest(tmp_path, PORTABLE, bundle=False)
    content["parts"][0]["program"] |= {"bundles": {"t1": "x"}}
    content["parts"][0] |= {"functions": {"1": "t1"}, "contexts": {"64": {"functions": {"1": "c64_t1"}}}}
    assert (path(loadable(content, tmp_path)) / "model.mil").read_text() == "c64_t1 t1"


def test_the_portable_engine_loads_any_bundle(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, PORTABLE)
    assert path(loadable(manifest(tmp_path, MAC), tmp_path)) == tmp_path / "compiled/head_0.mlmodelc"


def test_without_its_package_a_foreign_bundle_is_loaded_with_a_word(
    compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert path(loadable(manifest(tmp_path, PORTABLE, package=False), tmp_path)).is_dir()
    assert "compiled by the portable compiler, and its package is not in the build" in capsys.readouterr().err


def test_a_program_of_which_nothing_is_there_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(
        ShardmillError, match=r"head_0.mlmodelc is missing, and so is its package; pull the build again"
    ):
        loadable(manifest(tmp_path, PORTABLE, bundle=False, package=False), tmp_path)


def test_a_package_that_core_ml_refuses_is_told_in_its_words_and_leaves_nothing(
    compiler: Compiler, tmp_path: Path
) -> None:
    compiler.error = RuntimeError("unknown opset")
    with pytest.raises(ShardmillError, match=r"head_0.mlpackage can't be compiled: unknown opset"):
        loadable(manifest(tmp_path, PORTABLE), tmp_path)
    assert not any(file for file in (tmp_path / "cache").rglob("*.mlmodelc"))


def test_a_cache_that_can_not_be_written_is_told_with_the_remedy(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ShardmillError, match=r"cache/.*: can't be made \(.*\), .* set XDG_CACHE_HOME to a folder"):
        loadable(manifest(tmp_path, PORTABLE), tmp_path)


def test_what_one_build_compiled_is_not_loaded_for_another_that_claims_the_same(
    compiler: Compiler, tmp_path: Path
) -> None:
    """Whatever hashes its model.json names: they are a stranger's claim."""
    own = path(loadable(manifest(tmp_path / "own", PORTABLE), tmp_path / "own"))
    other = path(loadable(manifest(tmp_path / "other", PORTABLE), tmp_path / "other"))
    assert own != other and own.is_dir() and len(compiler.compiled) == 2
