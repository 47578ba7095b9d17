"""`shardmill doctor`: what each machine can do, lacks, or does worse."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from shardmill import cli, doctor
from shardmill.doctor import Finding


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
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("engine", "none", "missing", "reinstall")])
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
        (doctor.engine(True, True, "15.0"), "ok ok ok"),
        (doctor.engine(True, True, "14.7"), "missing"),
        (doctor.engine(True, False, "15.0"), "missing"),
        (doctor.engine(False, False, ""), "ok limited limited"),
        ([doctor.memory(4 << 30), doctor.memory(16 << 30)], "limited ok"),
        ([doctor.disk(1 << 20), doctor.disk(1 << 40)], "limited ok"),
        (doctor.packages(["no-such-package==1"]), "missing"),
        (doctor.packages(["typer==0.0.1"]), "limited"),
        (doctor.packages(["torch>=2"]), "ok"),
        (doctor.packages(["typer>=0.1", "no-such-package==1; extra == 'test'"]), ""),
    ],
)
def test_doctor_s_verdicts(findings: list[Finding], verdicts: str) -> None:
    """What each machine can do: a Mac measures, Linux predicts, old systems and wrong versions are named."""
    assert " ".join(finding.verdict for finding in findings) == verdicts


def test_doctor_never_predicts_on_a_mac_nor_measures_on_linux() -> None:
    """Residency is measured by Core ML or predicted by rules; the report says which."""
    values = {on: {f.subject: f.value for f in doctor.engine(on, on, "15.0")} for on in (True, False)}
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
