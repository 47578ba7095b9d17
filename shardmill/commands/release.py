"""Commands around a release: sign, verify, publish, pull, rebuild, diff, rotate."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardmill import machine
from shardmill.commands.arguments import Build
from shardmill.files import how_to_build
from shardmill.printable import one_line

if TYPE_CHECKING:
    from shardmill.release.compare import Difference
    from shardmill.release.verify import VerificationReport


def sign(
    build: Build,
    key: Annotated[Path, typer.Option(help="Your private key: PEM, curve P-256, P-384 or P-521, no password.")],
) -> None:
    """Sign a build: its attestations as DSSE envelopes, and all files that leave the machine with an OpenSSF signature.

    Works without a network. Verify with `shardmill verify BUILD --key PUBLIC`, or with other tools: docs/releasing.md.
    """
    from shardmill.release.sign import sign_build

    for name in sign_build(build, key):
        typer.echo(build / name)


SHOWN = 20


def verify(
    build: Build,
    key: Annotated[list[Path] | None, typer.Option(help="Public key (PEM) of somebody you trust, repeatable.")] = None,
) -> None:
    """Check every byte, statement and signature of a build. Exit code 1 if something is changed, missing or added.

    All records hang on provenance.json, whose sha256 is printed: whoever can write to the folder could have replaced
    them all. With --key they must be signed by one of the keys; without, compare the sha256 with one noted elsewhere.
    """
    from shardmill.checkpoint.hashing import hash_file
    from shardmill.records.finished import ATTESTATION
    from shardmill.release.sign import read_public
    from shardmill.release.verify import prove

    proof = prove(build, [read_public(file) for file in key or ()])
    for name, what in proof.wrong[:SHOWN]:
        typer.echo(f"{one_line(name)}: {one_line(what)}", err=True)
    if len(proof.wrong) > SHOWN:
        typer.echo(f"... and {len(proof.wrong) - SHOWN} more", err=True)
    audit = proof.audit
    typer.echo(
        f"{audit.checked} files checked, {len(proof.wrong)} wrong; "
        f"{audit.unchecked} logs and marks of Snakemake, macOS, git and the hub not checked"
    )
    typer.echo(f"{ATTESTATION}: sha256 {hash_file(build / ATTESTATION)}")
    _tell(proof)
    if proof.wrong:
        typer.echo(_remedy(build, proof), err=True)
        raise typer.Exit(1)


def _remedy(build: Path, proof: VerificationReport) -> str:
    """Return what to do about what is wrong."""
    from shardmill.release.verify import UNSIGNED

    if all(what == UNSIGNED for _, what in proof.wrong):
        return f"No signature is there to be checked by --key. Sign the build: shardmill sign {build} --key PRIVATE"
    return (
        f"Remove what is wrong (for a file in source/, {build / 'source.receipt.json'} too) and build again: "
        f"{how_to_build(build)}"
    )


def _tell(proof: VerificationReport) -> None:
    """Print a table of all claims, each with its proof and its result."""
    lines = [("what", "proved by", "result"), *proof.rows]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for what, by, result in lines:
        typer.echo(f"{what:{widths[0]}}  {by:{widths[1]}}  {result}")


def publish(
    build: Build,
    repo: Annotated[str, typer.Argument(metavar="REPO_ID", help="owner/name on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    include: Annotated[
        Literal["packages", "compiled", "both"] | None,
        typer.Option(help="Programs to upload; default: the signed ones, or both."),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="License identifier; default: the license of the checkpoint's repository.")
    ] = None,
    may: Annotated[
        bool, typer.Option("--i-may", help="Confirm that you may publish, if the license does not plainly say so.")
    ] = False,
    key: Annotated[Path | None, typer.Option(help="Private key (PEM) to sign with, the card included.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be uploaded; send nothing, and leave the build as it is.")
    ] = False,
) -> None:
    """Upload a build with a card, its attestations and its signatures. Run it again to continue after an interruption.

    Refuses a build whose files or verdicts are wrong, whose license does not allow it, or that names your machine.
    """
    from shardmill.release.publish import PublishOptions, on_trial, prepare_upload, upload

    wish = PublishOptions(repo, private, include, license, may, key)
    if dry_run:
        with on_trial(build) as copy:
            _offer(copy, prepare_upload(copy, wish), repo)
        return
    files = prepare_upload(build, wish)
    commit = upload(build, files, wish)
    typer.echo(f"{len(files)} files, {_megabytes(build, files)}: hf:{repo}@{commit}")


def _offer(build: Path, files: list[str], repo: str) -> None:
    """Print what would be uploaded: the files and the card."""
    from shardmill.release.bundle import CARD

    for name in files:
        typer.echo(name)
    typer.echo(f"{len(files)} files, {_megabytes(build, files)} would be uploaded to {repo}, with this {CARD}:")
    typer.echo(f"\n{(build / CARD).read_text(encoding='utf-8')}", nl=False)


def _megabytes(build: Path, files: list[str]) -> str:
    return f"{sum((build / name).stat().st_size for name in files) / 1e6:.1f} MB"


def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO_ID[@REVISION]", help="A published build: owner/name.")],
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: one in shardmill's cache.")] = None,
    key: Annotated[
        list[Path] | None, typer.Option(help="Public key (PEM), repeatable; one of them must have signed the build.")
    ] = None,
) -> None:
    """Fetch a published build, check all that `verify` checks, and print its folder.

    Every command that takes a build folder takes hf:OWNER/NAME[@REVISION] as well.
    """
    from shardmill.release.pull import address
    from shardmill.release.pull import pull as pull_build
    from shardmill.release.sign import read_public

    typer.echo(pull_build(address(repo), out, [read_public(file) for file in key or ()]))


def rebuild(
    build: Build,
    out: Annotated[Path, typer.Option(help="Folder to build in; it is created.")] = Path("rebuilt"),
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Private key (PEM), to sign that you built the same bytes.")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="Folder of the checkpoint, if it is on no hub.")] = None,
    cores: Annotated[int, typer.Option(min=1, help="Cores for Snakemake.")] = machine.cores(),
) -> None:
    """Build again what a provenance.json, a build's folder or hf:OWNER/NAME describes, and compare every byte.

    Exit code 1 if a byte differs, with the step and the ingredient that explain it. For a build with a calibration text
    it says how many codes differ. If packages have other versions, or shardmill has other code, nothing is built.
    """
    from shardmill.release import rebuild

    original = rebuild.read_original(build)
    rebuild.check_tools(original)
    again = rebuild.build_again(original, out, cores, source)
    told = rebuild.compare_rebuilt(original, again)
    for line in (*told, *rebuild.codes_compared(original, again)):
        typer.echo(line, err=bool(told))
    if told:
        raise typer.Exit(1)
    typer.echo(f"{len(original.statement['subject'])} subjects, 0 differing bytes: {again}")
    for path in rebuild.state(again, sign, original.folder) if sign else ():
        typer.echo(f"signed: {path}")


WORDS = {
    "config": "different in the config",
    "workflow": "a different shardmill",
    "package": "different packages",
    "checkpoint": "a different checkpoint",
    "tensor": "different tensors in the checkpoint",
    "part": "divided into different parts",
    "operations": "different operations",
    "weights": "weights in different forms",
    "bytes": "files with different bytes",
    "verdict": "different numbers from the gates",
    "figure": "different figures from the benchmark",
}
DIFFERENCES = 12


def diff(
    before: Build,
    after: Build,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    everything: Annotated[bool, typer.Option("--all", help=f"Show more than {DIFFERENCES} lines of a kind.")] = False,
) -> None:
    """Show what differs between two builds, from the checkpoint's tensors to the gates' numbers, and why.

    Exit code 0 whether or not something differs.
    """
    from shardmill.release.compare import compare_builds, reasons

    differences, why = compare_builds(before, after), reasons(before, after)
    if as_json:
        content = {"differences": [asdict(each) for each in differences], "reasons": why}
        typer.echo(json.dumps(content))
        return
    for kind, words in WORDS.items():
        _print_differences(words, [each for each in differences if each.kind == kind], everything)
    if why:
        typer.echo("why:")
    for line in why if everything else why[:DIFFERENCES]:
        typer.echo(f"  {one_line(line)}")
    typer.echo(f"{len(differences)} differences" if differences else "no difference")


def _print_differences(words: str, differences: list[Difference], everything: bool) -> None:
    """Print one kind of difference, in a few lines."""
    if differences:
        typer.echo(f"{words}:")
    for each in differences if everything else differences[:DIFFERENCES]:
        typer.echo(f"  {one_line(each.name)}: {_shown(each.before)} -> {_shown(each.after)}")
    if len(differences) > DIFFERENCES and not everything:
        typer.echo(f"  ... and {len(differences) - DIFFERENCES} more (--all shows them)")


def _shown(value: Any) -> str:
    """Return a readable value; hashes are shortened."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = one_line(value)
    return f"{text[:12]}..." if len(text) == 64 and text.isalnum() else text


def rotate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
) -> None:
    """Rotate a checkpoint's weights: it stays the same model, to within fp32's rounding, but loses less in INT4."""
    from shardmill.imports import needing_lab, quiet_coremltools, quiet_transformers

    with needing_lab(), quiet_coremltools(), quiet_transformers():
        from shardmill_lab.rotate import rotate_checkpoint as write

        difference = write(checkpoint, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 1e9:.2f} GB; its logits differ from the original's by {difference:.1e}")
