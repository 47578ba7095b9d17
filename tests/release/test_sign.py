"""`shardmill sign` and `verify --key`: other tools verify what it wrote, and whatever is changed is refused by name."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from pipeline import made

from shardmill.errors import ShardmillError
from shardmill.files import read_json, sealed, write_json
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.records.attest import with_seal
from shardmill.records.audit import is_out_of_scope
from shardmill.records.finished import row_fault
from shardmill.release.sign import read_private, read_public, sign_build, signed_files
from shardmill.release.verify import prove

from .forgeries import change
from .signed import Keys, in_toto_alone, make_keys, model_signing, run

FLIPS = 200


def test_a_signed_build_is_proved(signed: Path, keys: Keys) -> None:
    code, text = run("verify", signed, "--key", keys.public)
    assert code == 0, text
    assert text.count(f"key {keys.known.short} ({keys.public.name})  signed") == 3
    assert "43 numbers of 5 gates" in text and "by 1 independently" in text


@pytest.mark.thorough
def test_a_link_to_a_build_is_followed(build: Path, keys: Keys, tmp_path: Path) -> None:
    """A link such as `latest`, which the signing library refuses."""
    latest = tmp_path / "latest"
    latest.symlink_to(build)
    code, text = run("sign", latest, "--key", keys.private)
    assert code == 0, text
    assert model_signing(build, keys.public).returncode == 0
    code, text = run("verify", latest, "--key", keys.public)
    assert code == 0 and "the bundle" in text, text


def test_without_a_key_nobody_proves(signed: Path, build: Path) -> None:
    code, text = run("verify", signed)
    assert code == 0 and "signed, not checked: give --key" in text
    shutil.rmtree(build / "attestations")
    (build / "model.sig").unlink()
    assert "nobody  not signed" in run("verify", build)[1].replace("   ", "")


def test_a_build_that_nobody_signed_is_to_be_signed_and_not_built_again(build: Path, keys: Keys) -> None:
    code, text = run("verify", build, "--key", keys.public)
    assert (code, "missing: not signed" in text, "build again" in text) == (1, True, False)
    assert text.endswith(f"Sign the build: shardmill sign {build} --key PRIVATE\n")
    (build / "embedding.safetensors").write_text("other")
    assert "build again" in run("verify", build, "--key", keys.public)[1]


@pytest.mark.thorough(but=["secp256r1"])
@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_other_tools_alone_verify(build: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    keys, wrong = make_keys(tmp_path, "right", curve), make_keys(tmp_path, "wrong", curve)
    sign_build(build, keys.private)
    done = model_signing(build, keys.public)
    assert done.returncode == 0 and "succeeded" in done.stdout + done.stderr, done
    assert model_signing(build, wrong.public).returncode != 0
    done = in_toto_alone(build, keys.public)
    assert done.returncode == 0 and done.stdout.strip() == "27 subjects", done
    assert in_toto_alone(build, wrong.public).returncode != 0


@pytest.mark.thorough
def test_other_tools_alone_refuse_what_was_changed(signed: Path, keys: Keys) -> None:
    file = signed / "compiled/head_0.mlmodelc/inner/data"
    file.chmod(0o644)
    file.write_text("other")
    assert "head_0" in (done := model_signing(signed, keys.public)).stdout + done.stderr and done.returncode
    assert "compiled/head_0.mlmodelc/inner/data" in in_toto_alone(signed, keys.public).stderr


@pytest.mark.parametrize(
    "flips", [pytest.param(0, marks=pytest.mark.thorough), pytest.param(FLIPS, marks=pytest.mark.slow)]
)
def test_any_bit_of_what_leaves_the_machine_counts(flips: int, signed: Path, keys: Keys) -> None:
    """A bit is flipped in each file of bundle, statements and signatures, one at a time: each is refused by name."""
    names = sorted(path.relative_to(signed).as_posix() for path in signed.rglob("*") if path.is_file())
    names = [name for name in names if not is_out_of_scope(name)]
    assert {"model.sig", "attestations/provenance.dsse.jsonl", "bundle.json", "config.json"} <= set(names)
    draw = random.Random(0)
    chosen = [*names, *draw.choices(names, k=flips)]
    for name in chosen:
        path = signed / name
        content, mode = path.read_bytes(), path.stat().st_mode
        at, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        path.chmod(0o644)
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        try:
            told = [fault[0] for fault in prove(signed, [keys.known]).wrong]
        except ShardmillError as error:
            told = [str(error).split(":")[0].split(" ")[0].removeprefix(f"{signed}/")]
        assert name in told, (name, at, bit, told)
        path.write_bytes(content)
        path.chmod(mode)
    assert prove(signed, [keys.known]).wrong == ()


@pytest.mark.thorough
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["model.sig", "attestations/provenance.dsse.jsonl", "attestations/test-results.dsse.jsonl"]
)
def test_every_bit_of_a_signature_counts(signed: Path, keys: Keys, name: str, step: int) -> None:
    """Bits that base64 and JSON leave without meaning count too. They lie near the end."""
    content = (signed / name).read_bytes()
    ends = range(len(content) - 60, len(content))
    for at in sorted({*range(0, len(content), len(content) // 40), *ends, *range(40)})[::-step]:
        (signed / name).write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 7]) + content[at + 1 :])
        assert name in [fault[0] for fault in prove(signed, [keys.known]).wrong], at


@pytest.mark.parametrize("name", ["provenance.dsse.jsonl", "test-results.dsse.jsonl"])
def test_newlines_of_another_kind_are_other_bytes(signed: Path, keys: Keys, name: str) -> None:
    file = signed / "attestations" / name
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert f"attestations/{name}" in [fault[0] for fault in prove(signed, [keys.known]).wrong]


def wrong_key(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    return "attestations/provenance.dsse.jsonl: not signed by", make_keys(tmp_path, "stranger")


def swapped_envelopes(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    folder = signed / "attestations"
    shutil.copyfile(folder / "test-results.dsse.jsonl", folder / "provenance.dsse.jsonl")
    return "attestations/provenance.dsse.jsonl: its payload is not provenance.json", keys


def another_build_s_envelope(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    other = made.finish(tmp_path / "other")
    write_json(other / "parity/stack.json", {"part": "stack", "gate": []})
    text = (other / "provenance.json").read_text().replace('"tiny"', '"tinier"')
    content = json.loads(text)
    write_json(other / "provenance.json", with_seal(content))
    sign_statements_only(other, keys)
    shutil.copyfile(other / "attestations/provenance.dsse.jsonl", signed / "attestations/provenance.dsse.jsonl")
    return "attestations/provenance.dsse.jsonl: its payload is not provenance.json", keys


def sign_statements_only(build: Path, keys: Keys) -> None:
    from shardmill.release.sign import write_envelopes

    payload = (build / "provenance.json").read_bytes()
    write_envelopes(build / "attestations/provenance.dsse.jsonl", [payload], read_private(keys.private))


def stripped_subject(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    """Even where whoever holds the key signs it: the statement is not whole."""
    content = read_json(signed / "provenance.json")
    content["subject"] = [row for row in content["subject"] if "head_0.mlpackage" not in row["name"]]
    write_json(signed / "provenance.json", with_seal(content))
    sign_build(signed, keys.private)
    return "provenance.json: packages/head_0.mlpackage/inner/data is not among its subjects", keys


def stripped_test_result(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    envelopes = signed / "attestations/test-results.dsse.jsonl"
    envelopes.write_text("".join(envelopes.read_text().splitlines(keepends=True)[1:]))
    return "attestations/test-results.dsse.jsonl: its payload is not test-results.jsonl", keys


def added_file(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    (signed / "compiled/head_0.mlmodelc/more.bin").write_text("more")
    return "compiled/head_0.mlmodelc/more.bin: not a part of the build", keys


def added_attestation(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    (signed / "attestations/more.dsse.jsonl").write_text("more")
    return "attestations/more.dsse.jsonl: not a part of the build", keys


def added_file_that_the_record_names(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    """A stranger can write bundle.json anew, but not sign it."""
    (signed / "evil.json").write_text("{}")
    content = read_json(signed / "bundle.json")
    content["files"]["evil.json"] = made.hash_file(signed / "evil.json")
    write_json(signed / "bundle.json", sealed(content))
    return "model.sig: ", keys


def left_out(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    """Nor may it leave out what a runtime reads."""
    content = read_json(signed / "bundle.json")
    content["left_out"].append("model.json")
    write_json(signed / "bundle.json", sealed(content))
    return "leaves out what must be there", keys


def unsigned(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    (signed / "model.sig").unlink()
    return "model.sig: missing: not signed", keys


def another_bundle_s_signature(signed: Path, tmp_path: Path, keys: Keys) -> tuple[str, Keys]:
    other = made.finish(tmp_path / "another")
    (other / "report.html").write_text("<p>slow</p>")
    drawn = read_json(other / "report.receipt.json")
    drawn["outputs"]["page"] = made.hash_file(other / "report.html")
    write_json(other / "report.receipt.json", sealed(drawn))
    sign_build(other, keys.private)
    shutil.copyfile(other / "model.sig", signed / "model.sig")
    return "model.sig: ", keys


FORGERIES = [wrong_key, swapped_envelopes, another_build_s_envelope, stripped_subject, stripped_test_result, added_file]
FORGERIES += [added_attestation, added_file_that_the_record_names, left_out, unsigned, another_bundle_s_signature]


@pytest.mark.thorough(but=["wrong_key", "swapped_envelopes", "stripped_subject", "added_file", "left_out", "unsigned"])
@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_what_is_forged_is_refused(
    signed: Path, tmp_path: Path, keys: Keys, forge: Callable[[Path, Path, Keys], tuple[str, Keys]]
) -> None:
    expected, believed = forge(signed, tmp_path, keys)
    code, text = run("verify", signed, "--key", believed.public)
    assert (code, expected in text) == (1, True), text


def test_a_verdict_is_held_against_the_thresholds_of_this_shardmill(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder whose thresholds were others signs in vain."""
    monkeypatch.setitem(THRESHOLDS, "kl", replace(THRESHOLDS["kl"], limit=0.0001))
    assert prove(signed, [keys.known]).wrong == (
        ("parity/stack.json", "kl must be <= 0.0001, and its verdict says <= 0.02"),
    )
    monkeypatch.delitem(THRESHOLDS, "psnr")
    assert ("parity/head_0.json", "psnr is no number that this shardmill knows") in prove(signed, [keys.known]).wrong


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("<= 2e-06", "width_error is 3e-06, must be <= 2e-06"),
        ("<= 0.0001", ""),
        ("<= 1", "width_error must be <= 0.0001, and its verdict says <= 1"),
        ("", "width_error must be <= 0.0001, and its verdict says "),
    ],
)
def test_a_number_is_held_against_the_model_s_own_limit_too(stated: str, expected: str) -> None:
    row = {"name": "width_error", "value": 3e-6, "threshold": stated, "limit_why": "22 times ...", "passed": True}
    assert row_fault(row, THRESHOLDS) == expected
    assert row_fault(row | {"value": 2e-4, "threshold": "<= 1e-4"}, THRESHOLDS).endswith("must be <= 0.0001")


@pytest.mark.thorough(but=["{'gate': []}"])
@pytest.mark.parametrize("content", [{"part": "stack"}, {"part": "stack", "gate": [5]}, {"gate": []}], ids=str)
def test_what_is_no_verdict_is_named(
    tmp_path: Path, keys: Keys, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all hashes are right."""
    build = made.finish(tmp_path / "build")
    with monkeypatch.context() as once:
        once.setattr(made, "gate_statements", lambda *_: [])
        change(build / "parity/stack.json", lambda verdict: (verdict.clear(), verdict.update(content)))
        sha = made.hash_file(build / "parity/stack.json")
        change(build / "parity/stack.receipt.json", lambda receipt: receipt["outputs"].update(verdict=sha))
        made.attest(build)
    told = [name for name, _ in prove(build, []).wrong]
    assert {"parity/stack.json", "test-results.jsonl"} <= {*told}


def test_nothing_that_is_signed_is_snakemake_s(signed: Path) -> None:
    payloads = [
        json.loads(line)["payload"] for path in (signed / "attestations").glob("*.dsse.jsonl") for line in path.open()
    ]
    payloads.append(json.loads((signed / "model.sig").read_text())["dsseEnvelope"]["payload"])
    assert len(payloads) == 7
    for payload in payloads:
        assert b"snakemake_timestamp" not in base64.b64decode(payload)
    assert not any(name.startswith(("logs", "reference", "source/model")) for name in signed_files(signed))
    assert {"model.json", "config.json", "compiled/head_0.mlmodelc/inner/data"} <= signed_files(signed)


def test_signing_twice_is_signing_once(signed: Path, keys: Keys, others: Keys) -> None:
    before = signed_files(signed)
    sign_build(signed, others.private)
    assert signed_files(signed) == before
    assert run("verify", signed, "--key", others.public)[0] == 0
    assert run("verify", signed, "--key", keys.public)[0] == 1


def test_a_build_that_is_wrong_is_not_signed(build: Path, keys: Keys) -> None:
    (build / "more").touch()
    with pytest.raises(ShardmillError, match="more: not a part of the build"):
        sign_build(build, keys.private)
    assert not (build / "model.sig").exists() and not (build / "attestations").exists()


def test_a_key_that_is_none_is_told_with_the_remedy(tmp_path: Path, keys: Keys) -> None:
    (tmp_path / "text").write_text("text")
    odd = make_keys(tmp_path, "odd", ec.SECP256K1())
    for read, file, said in (
        (read_private, tmp_path / "text", "no private key in PEM; `openssl"),
        (read_private, keys.public, "no private key in PEM"),
        (read_public, keys.private, "no public key in PEM"),
        (read_private, tmp_path / "nowhere", "can't be read"),
        (read_private, odd.private, "not a key of one of the curves"),
    ):
        with pytest.raises(ShardmillError, match=said):
            read(file)


def test_without_the_libraries_one_line_tells(build: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "securesystemslib.signer", None)
    code, text = run("sign", build, "--key", keys.private)
    assert (code, text.strip()) == (
        1,
        "shardmill: securesystemslib.signer is not installed; in a clone: pip install -e '.[sign]'",
    )
