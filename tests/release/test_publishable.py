"""What may be published: nothing that names the machine, and a license that lets changed copies be passed on."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from shardmill.errors import ShardmillError
from shardmill.release.publishable import License, check_leaks, check_license

TOLD = (
    "{cwd}/checkpoint",
    "{home}",
    "by {host}",
    "{build}",
    "https://{host}/a",
    "/data/anna/checkpoint",
    "anna@cluster",
    "C:\\\\Users\\\\anna",
)


@pytest.mark.parametrize("told", TOLD)
def test_what_would_name_the_machine_is_refused(build: Path, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "mac-of-anna")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    text = told.format(cwd=Path.cwd(), home=Path.home(), host="mac-of-anna", build=build)
    (build / "parity/head_0.json").write_text(text)
    with pytest.raises(
        ShardmillError, match=r"parity/head_0\.json: names .*; give the config a path or a text without it"
    ):
        check_leaks(build, ["model.json", "parity/head_0.json"])
    harmless = (
        "/annabel mac-of-anna-2 of-anna.example anna/tiny https://huggingface.co/anna/tiny pkg:huggingface/anna/a@1"
    )
    (build / "parity/head_0.json").write_text(f"{Path.cwd()}-elsewhere {harmless}")
    check_leaks(build, ["model.json", "parity/head_0.json"])


@pytest.mark.parametrize("id", ["apache-2.0", "mit", "llama3.2", "gemma", "cc-by-nc-4.0", "bigscience-openrail-m"])
def test_licenses_that_let_changed_copies_be_passed_on(id: str) -> None:
    assert check_license(License(id), may=False).id == id


@pytest.mark.parametrize("id", ["cc-by-nd-4.0", "cc-by-nc-nd-4.0", "other", "my-own"])
def test_other_licenses_need_somebody_s_word(id: str) -> None:
    with pytest.raises(ShardmillError, match="--i-may"):
        check_license(License(id), may=False)
    assert check_license(License(id), may=True).id == id
