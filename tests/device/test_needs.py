"""measure.py says in one line what its Python lacks, before it measures anything, and does not pass for done then."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from kit_runner import main as runner
from typer.testing import CliRunner

from shardmill.cli import app

from .measuring import HERE, command, environment, measured

OLD = """
import runpy, sys
sys.version_info = (3, 9, 6)
sys.argv = ["measure.py"]
runpy.run_path("measure.py", run_name="__main__")
"""


def refused(kit: Path, *command: str, **more: str) -> str:
    """What it says, in one line."""
    done = subprocess.run(
        command, check=False, cwd=kit, env=environment(kit, HERE / "fake", **more), capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
    return done.stderr


def test_python_3_9_is_told_what_it_is(kit: Path) -> None:
    """Apple's own; it reads measure.py, and nothing that this would import."""
    ast.parse((kit / "measure.py").read_text(), feature_version=(3, 9))
    assert "and 3.10 to 3.13 is needed" in refused(kit, sys.executable, "-c", OLD)
    assert not (kit / "results.jsonl").exists()


@pytest.mark.parametrize("package", ["numpy", "coremltools"])
def test_a_package_that_is_not_there_is_named(kit: Path, package: str) -> None:
    """With the venv beside measure.py, where there is one."""
    with open(kit.parent / "away/sitecustomize.py", "a") as file:
        file.write("import importlib.util as u\nfind = u.find_spec\n")
        file.write(f"u.find_spec = lambda name, *rest: None if name == {package!r} else find(name, *rest)\n")
    said = refused(kit, *command(kit))
    assert f"{package} is not installed for this Python" in said and "python3.12 -m venv .venv" in said
    (kit / ".venv/bin").mkdir(parents=True)
    (kit / ".venv/bin/python").write_text("")
    assert refused(kit, *command(kit)).endswith(f"use {kit / '.venv/bin/python'} measure.py\n")


def test_another_coremltools_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "version", lambda name: "8.3.0")
    assert "coremltools is 8.3.0, and 9.0 is needed" in runner.lacking(Path("measure.py"), None)


@pytest.mark.thorough
def test_a_native_module_that_can_t_be_imported_is_told() -> None:
    """Another process tries the import. On a Mac, a module that does not exist stands for a broken one."""
    broken = "no_such_module" if sys.platform == "darwin" else None
    name = broken or "coremltools.libcoremlpython"
    assert f"{name} can't be imported (ModuleNotFound" in runner.lacking(Path("measure.py"), broken)
    assert runner.lacking(Path("measure.py"), "json") == ""


def test_where_nothing_could_be_measured_the_run_has_failed(kit: Path) -> None:
    said = refused(kit, *command(kit, "--timeout", "0.001", "--only", "compile"))
    assert "nothing could be measured here: no end of" in said


def test_results_of_another_python_are_told_as_such(kit: Path) -> None:
    measured(kit, "--only", "compile")
    file = kit / "results.jsonl"
    head, rest = file.read_text().split("\n", 1)
    version = sys.version.split()[0]
    file.write_text(head.replace(f'"python": "{version}"', '"python": "3.9.1"') + "\n" + rest)
    assert f"is of another python (3.9.1, this is {version}); move it away" in refused(kit, *command(kit))


def test_the_kit_says_how_it_is_measured(build: Path, tmp_path: Path) -> None:
    """In words that a person can copy: the Python of the venv, which has coremltools."""
    said = CliRunner().invoke(app, ["device", "kit", str(build), "-o", str(tmp_path / "kit.zip")])
    assert said.exit_code == 0 and "cd shardmill-kit && python3.12 -m venv .venv" in said.output
    assert said.output.strip().endswith(".venv/bin/python measure.py")
