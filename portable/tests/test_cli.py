"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import portable_coreml
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
    attention_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next one is not told that the bundle exists already."""
    written, compile_model = list[Path](), cli.compile_model

    def cut_short(source: Path, destination: Path) -> Path:
        written.append(compile_model(source, destination))
        raise KeyboardInterrupt

    arguments = ["compile", str(attention_package), str(tmp_path / "new" / "m.mlmodelc")]
    monkeypatch.setattr(cli, "compile_model", cut_short)
    assert main(arguments) == 130
    assert capsys.readouterr().err == "portable-coreml: interrupted\n"
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


def test_judge_tells_by_its_exit_code_what_it_found(
    attention_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 without errors, 1 with one, 2 if a file can't be judged; the others are judged all the same."""
    monkeypatch.chdir(attention_package.parent)
    assert main(["judge", "att*.mlpackage"]) == 0
    assert "attention.mlpackage: 0 errors" in capsys.readouterr().out
    (tmp_path / "limits.toml").write_text("error = 1e-9\nchip = 3\n[range]\nx = [-1, 1]\n")
    limits = [
        "--limits",
        str(tmp_path / "limits.toml"),
        "--markdown",
        str(tmp_path / "m.md"),
        "--sarif",
        str(tmp_path / "s"),
    ]
    assert main(["judge", "attention.mlpackage", *limits, "--annotations"]) == 1
    out = capsys.readouterr().out
    assert "error: fp16-error: " in out and "\n::error file=attention.mlpackage/Manifest.json,title=fp16-error" in out
    assert "| error | fp16-error |" in (tmp_path / "m.md").read_text()
    assert json.loads((tmp_path / "s").read_text())["runs"][0]["results"][0]["ruleId"] == "fp16-error"
    assert main(["judge", "nowhere.mlpackage", "attention.mlpackage", *limits, "--error", "1", "--json"]) == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert [report["path"] for report in told["reports"]] == ["attention.mlpackage"]
    assert captured.err == f"portable-coreml: {told['refused'][0]['why']}\n"


def test_diff_is_the_part_of_judge_that_compares(
    attention_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = str(attention_package)
    assert main(["diff", package, package]) == 0
    alone = capsys.readouterr().out
    assert "output 'hidden': the same" in alone
    assert main(["judge", package, "--against", package]) == 0
    assert alone in capsys.readouterr().out
    assert main(["diff", package, package, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"]["partings"] == []
    assert main(["diff", package, str(tmp_path / "nowhere.mlpackage")]) == 2


def test_bundles_and_residency_reports_are_compared(
    attention_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (str(tmp_path / name / "m.mlmodelc") for name in ("a", "b"))
    for bundle in (one, two):
        assert main(["compile", str(attention_package), bundle]) == 0
    assert main(["compare-compiled", one, two]) == 0
    (Path(two) / "analytics/coremldata.bin").unlink()
    assert main(["compare-compiled", one, two]) == 1
    assert capsys.readouterr().out == "0 files differ\nanalytics/coremldata.bin: only in m.mlmodelc\n1 files differ\n"
    assert main(["compare-compiled", one, str(tmp_path)]) == 2
    for evidence, statuses in (("predicted", ("eligible", "eligible")), ("measured", ("ineligible", "not_chosen"))):
        rows = [{"function": "main", "output": name, "status": s} for name, s in zip("ab", statuses, strict=True)]
        (tmp_path / evidence).write_text(json.dumps({"evidence": evidence, "rows": rows}))
    assert main(["diff-residency", str(tmp_path / "predicted"), str(tmp_path / "measured")]) == 1
    said = capsys.readouterr().out
    assert said == (
        "main a: predicted eligible, measured ineligible\n"
        "1 operations differ; 1 could run on the Neural Engine, but were given to another device\n"
    )
    assert main(["diff-residency", str(tmp_path / "measured"), str(tmp_path / "measured")]) == 2


LIMITS = {
    "no TOML": ("off = ", "limits.toml: not TOML"),
    "an unknown key": ("offf = 1", "there is no key 'offf'; there are system, "),
    "a text for a number": ("off = 'x'", "'off' must be a number"),
    "a truth for a number": ("off = true", "'off' must be a number"),
    "a list of numbers": ("accept = [1]", "'accept' must be a list of rules"),
    "half a range": ("[range]\nx = [1]", "the range of 'x' must be two numbers"),
    "a range that is empty": ("[range]\nx = [2, 1]", "there is no such number"),
    "an unknown system": ("system = ['macOS 9']", "macOS 9: no system whose limits are known"),
    "a precision without rounding": ("precision = 'fp64'", "precision must be fp32, fp16"),
    "a range of nothing": ("[range]\nz = [1, 2]", "no program has an input 'z'"),
}


@pytest.mark.parametrize("what", sorted(LIMITS))
def test_a_file_of_limits_is_refused_by_file_and_key(
    attention_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    content, message = LIMITS[what]
    (tmp_path / "limits.toml").write_text(content)
    assert main(["judge", str(attention_package), "--limits", str(tmp_path / "limits.toml")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("version", ["8.3.0", "9.1", None])
def test_another_coremltools_is_refused_in_one_line(
    attention_package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str | None
) -> None:
    """Its native module is called otherwise, so results would be wrong, or an error far from its cause."""

    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    assert main(["lint", str(attention_package)]) == 1
    said = capsys.readouterr().err
    assert f"coremltools {version or 'none'} is installed; it must be 9.0 or 9.1.dev1" in said and said.count("\n") == 1
    with pytest.raises(portable_coreml.PortableError, match="it must be"):
        portable_coreml.install()
    monkeypatch.setattr(metadata, "version", lambda name: "9.1.dev1")
    assert main(["lint", str(attention_package)]) == 0
