"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from portable_coreml import cli
from portable_coreml.cli import main
from portable_coreml.files.bundle import is_bundle
from portable_coreml.judge.lint import read_report

from tests.conftest import step_inputs


def test_inspect_names_what_is_in_a_package(attention_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(attention_package)]) == 0
    text = capsys.readouterr().out
    for part in (
        "function main (CoreML8)",
        "input x: float16 [1, 32, 1..4, 1]",
        "state cache_k: float16 [1, 1, 8, 32]",
    ):
        assert part in text
    assert main(["inspect", str(attention_package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["functions"][0]["name"] == "main"


def test_lint_fails_on_errors_alone(attention_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A remark is no failure: a build on a server shall stop for what will not run where it should."""
    assert main(["lint", str(attention_package)]) == 0
    assert "0 errors, " in capsys.readouterr().out
    assert main(["lint", str(attention_package), "--ios", "--chip", "1", "--json"]) == 0
    assert {row["severity"] for row in json.loads(capsys.readouterr().out)} <= {"warn", "info"}


def test_residency_is_a_report_that_can_be_compared(
    attention_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["residency", str(attention_package)]) == 0
    (tmp_path / "predicted.json").write_text(capsys.readouterr().out)
    assert {row["status"] for row in read_report(tmp_path / "predicted.json", "predicted")} == {"eligible", "no_device"}


def test_fp16_is_rounded(attention_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "in.npz", **step_inputs(32, 8, 0, 2, 0))
    for precision, dtype in (("fp32", "float32"), ("fp16", "float16")):
        arguments = ["run", str(attention_package), str(tmp_path / "in.npz"), "--precision", precision]
        assert main(arguments) == 0
        assert capsys.readouterr().out == f"hidden: {dtype} [1, 32, 2, 1]\n"


def test_a_compilation_that_is_cut_short_leaves_nothing(
    attention_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is not told that the bundle exists already."""
    written, compile_model = list[Path](), cli.compile_model

    def cut_short(source: Path, destination: Path) -> Path:
        written.append(compile_model(source, destination))
        raise KeyboardInterrupt

    arguments = ["compile", str(attention_package), str(tmp_path / "new" / "m.mlmodelc")]
    monkeypatch.setattr(cli, "compile_model", cut_short)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert written and list((tmp_path / "new").iterdir()) == []
    monkeypatch.setattr(cli, "compile_model", compile_model)
    assert main(arguments) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.mlmodelc"]
    assert is_bundle(tmp_path / "new" / "m.mlmodelc")


REFUSED = {
    "no inputs": (["run", "MODEL", "nowhere.npz"], "nowhere.npz: can't be read: No such file"),
    "inputs of another kind": (["run", "MODEL", "MODEL/Manifest.json"], "not an .npz file of arrays"),
    "inputs that would run code": (["run", "MODEL", "pickled.npz"], "not an .npz file of arrays"),
    "an input that is missing": (["run", "MODEL", "empty.npz"], "input 'x' is missing"),
    "no model": (["run", "/dev/null", "empty.npz"], "/dev/null: not a regular file"),
    "no such function": (["run", "MODEL", "empty.npz", "--function", "prefill"], "no function 'prefill'"),
    "a place that is taken": (["compile", "MODEL", "."], "exists already"),
    "no package": (["lint", "nowhere"], "nowhere: no such file or folder"),
    "no folder to write to": (["run", "MODEL", "good.npz", "--out", "no/where.npz"], "no/where.npz"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_failures_are_one_line(
    attention_package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("good.npz", **step_inputs(32, 8, 0, 1, 0))
    np.savez("empty.npz")
    np.savez("pickled.npz", x=np.array([{}], dtype=object))
    arguments, message = REFUSED[what]
    assert main([argument.replace("MODEL", str(attention_package)) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("portable-coreml: ") and message in error and error.count("\n") == 1
