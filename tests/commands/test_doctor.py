"""`shardmill doctor`: what each machine can do, lacks, or does worse."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardmill import cli, machine
from shardmill.commands import doctor
from shardmill.commands.doctor import DoctorFinding


def shardmill(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_doctor_reports_this_machine() -> None:
    """Every subject appears, and a machine on which these tests run lacks nothing that a build needs."""
    result = shardmill("doctor", "--json")
    findings = json.loads(result.stdout)
    assert {f["subject"] for f in findings} >= {"Python", "system", "engine", "coremltools", "torch", "disk", "hub"}
    assert [f for f in findings if f["verdict"] == "missing"] == []
    assert result.exit_code == 0
    assert all(f["subject"] in shardmill("doctor").stdout for f in findings)


def test_doctor_fails_where_a_build_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script can ask: exit code 1 if anything is missing."""
    monkeypatch.setattr(doctor, "examine", lambda: [DoctorFinding("engine", "none", "missing", "reinstall")])
    assert shardmill("doctor").exit_code == 1


@pytest.mark.parametrize(
    ("findings", "verdicts"),
    [
        (
            [doctor.python((3, 10)), doctor.python((3, 11)), doctor.python((3, 13)), doctor.python((3, 14))],
            "missing ok ok missing",
        ),
        ([doctor.system("Darwin", "15.1", "arm64"), doctor.system("Darwin", "15.1", "x86_64")], "ok missing"),
        ([doctor.system("Linux", "", "x86_64"), doctor.system("Linux", "", "aarch64")], "ok missing"),
        ([doctor.system("Windows", "", "AMD64")], "missing"),
        (
            [doctor.system("Darwin", "15.1", "x86_64", True), doctor.system("Darwin", "15.1", "arm64", False)],
            "missing ok",
        ),
        (doctor.engine_finding(True, True, "15.0"), "ok ok ok"),
        (doctor.engine_finding(True, True, "14.7"), "missing"),
        (doctor.engine_finding(True, False, "15.0"), "missing"),
        (doctor.engine_finding(False, False, ""), "ok limited limited"),
        ([doctor.memory(4 << 30), doctor.memory(16 << 30)], "limited ok"),
        ([doctor.disk(1 << 20), doctor.disk(1 << 40)], "limited ok"),
        (doctor.packages(["no-such-package==1"]), "missing"),
        (doctor.packages(["typer==0.0.1"]), "limited"),
        (doctor.packages(["torch>=2"]), "ok"),
        (doctor.packages(["typer>=0.1", "no-such-package==1; extra == 'test'"]), ""),
    ],
)
def test_doctor_s_verdicts(findings: list[DoctorFinding], verdicts: str) -> None:
    """What each machine can do: a Mac measures, Linux predicts, old systems and wrong versions are named."""
    assert " ".join(finding.verdict for finding in findings) == verdicts


PLUGGED, UNPLUGGED = "Now drawing from 'AC Power'\n", "Now drawing from 'Battery Power'\n -InternalBattery-0 80%\n"
USUAL, LOW = "Currently in use:\n lowpowermode         0\n", "Currently in use:\n lowpowermode         1\n"
DESKTOP_LOW = "Currently in use:\n powermode            1\n"


@pytest.mark.parametrize(
    ("power", "source", "found"),
    [
        (USUAL, PLUGGED, "full"),
        (LOW, PLUGGED, "Low Power Mode"),
        (DESKTOP_LOW, PLUGGED, "Low Power Mode"),
        (USUAL, UNPLUGGED, "on battery"),
        (LOW, UNPLUGGED, "Low Power Mode, on battery"),
    ],
)
def test_what_makes_a_mac_slow_is_told_before_it_is_measured(power: str, source: str, found: str) -> None:
    rosetta, finding = doctor.mac(False, power, source)
    assert (finding.value, finding.verdict) == (found, "ok" if found == "full" else "limited")
    assert (rosetta.value, rosetta.verdict, rosetta.meaning) == ("not installed", "ok", "not needed")


def test_a_mac_that_does_not_tell_its_power_is_not_called_fast() -> None:
    assert [finding.subject for finding in doctor.mac(True, "", "")] == ["Rosetta"]


def test_doctor_on_schedulers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a Mac ilp has no solver, unless somebody has installed one; a profile that asks for it is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    assert doctor._schedulers() == {}
    assert doctor.scheduler(True, False, {}).verdict == "ok"
    for name, text in (
        ("profiles/default", "scheduler: greedy"),
        ("mine", "scheduler: ilp"),
        ("profiles/bare", "jobs: 2"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "profiles/._default").mkdir()
    asked = doctor._schedulers()
    assert asked == {"profiles/bare/config.yaml": "", "profiles/default/config.yaml": "greedy"}
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "mine")
    asked = doctor._schedulers()
    finding = doctor.scheduler(True, False, asked)
    assert (finding.value, finding.verdict) == ("greedy", "limited")
    assert "mine/config.yaml asks for ilp" in finding.meaning and "profiles/default" not in finding.meaning
    assert "profiles/bare/config.yaml asks for none" in finding.meaning
    assert doctor.scheduler(True, True, asked).verdict == doctor.scheduler(False, False, asked).verdict == "ok"
    assert doctor.scheduler(True, False, {"profiles/default/config.yaml": "greedy"}).verdict == "ok"


MAC = {
    ("sw_vers", "-productVersion"): "26.1",
    ("xcode-select", "-p"): "/Library/Developer/CommandLineTools",
    ("xcrun", "--find", "coremlcompiler"): "/somewhere/coremlcompiler",
    ("arch", "-x86_64", "/bin/echo", "started"): "started",
    ("pmset", "-g"): LOW,
    ("pmset", "-g", "batt"): PLUGGED,
}


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("translated", [True, False])
def test_a_mac_is_examined(tools: bool, translated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing opens a dialog: without developer tools xcrun would, so it is not asked."""
    answers = dict(MAC) if tools else {command: said for command, said in MAC.items() if command[0] != "xcode-select"}
    answers |= {doctor.TRANSLATED: "1"} if translated else {}
    asked = list[str]()

    def ask(*command: str) -> str:
        asked.append(command[0])
        if command not in answers:
            raise subprocess.CalledProcessError(1, command)
        return answers[command]

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64" if translated else "arm64")
    for module in (doctor, machine):
        monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(doctor, "_reaches_core_ml", lambda: True)
    found = {finding.subject: finding for finding in doctor.examine()}
    assert ("xcrun" in asked) == tools
    assert found["coremlcompiler"].value == ("/somewhere/coremlcompiler" if tools else "not found")
    assert found["system"].value == f"macOS 26.1 {'x86_64' if translated else 'arm64'}"
    assert found["system"].verdict == ("missing" if translated else "ok")
    assert ("Rosetta runs this Python" in found["system"].meaning) == translated
    assert (found["Rosetta"].value, found["power"].value) == ("installed", "Low Power Mode")


@pytest.mark.parametrize(
    ("content", "reached"), [("", True), ("raise ImportError", False), ("import os; os.abort()", False)]
)
def test_core_ml_is_reached_where_its_module_can_be_imported(
    content: str, reached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One for another Python can't, and one for another processor may end the process that tries."""
    (tmp_path / "coremltools").mkdir()
    (tmp_path / "coremltools/__init__.py").touch()
    (tmp_path / "coremltools/libcoremlpython.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "native_present", lambda: True)
    assert doctor._reaches_core_ml() is reached
    monkeypatch.setattr(doctor, "native_present", lambda: False)
    assert not doctor._reaches_core_ml()


def test_doctor_never_predicts_on_a_mac_nor_measures_on_linux() -> None:
    """Residency is measured by Core ML or predicted by rules; the report says which."""
    values = {on: {f.subject: f.value for f in doctor.engine_finding(on, on, "15.0")} for on in (True, False)}
    assert values[True]["residency"] == "measured"
    assert values[False]["residency"] == "predicted"
    assert values[False]["ANE speed"] == "not run"


def test_doctor_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline mode and the token are reported; the token itself never appears."""
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    assert doctor.hub()[0].value == "token found"
    assert "hf_secret" not in str(doctor.hub())
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert doctor.hub()[0].value == "no token"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert doctor.hub()[0].value == "offline"
