"""The bundle: the files of a build that leave the machine, and the bill of materials among them.

The bundle leaves out logs, Snakemake's marks, the original weights (their commit and hashes are recorded) and the
reference's states. bundle.json lists the other files that were left out, and the files that were added for people and
hubs. The build's own records list all other files.

The bill of materials is in CycloneDX (https://cyclonedx.org): the model, its checkpoint, the tools, and their licenses.
It repeats the facts of provenance.json in a format for inventory tools. Every run writes the same bytes: the serial
number is derived from the provenance, and there is no timestamp.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packageurl import PackageURL

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import parse_json, replacing, sealed, write_json
from shardmill.forms.recipe import called
from shardmill.records.attest import HOME, installed, read_provenance
from shardmill.records.audit import (
    BUNDLE,
    CARD_RECORD,
    SNAKEMAKE_MARK,
    added,
    audit,
    is_signature,
    may_be_absent,
    records,
)
from shardmill.records.finished import ATTESTATION
from shardmill.records.names import SOURCE
from shardmill.release.publishable import License

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

Include = Literal["packages", "compiled", "both"]
CARD = "README.md"
BOM = "bom.cdx.json"
# Files that hubs and libraries look for beside a model; hubs count a model's downloads by config.json.
COPIED = ("config.json", "generation_config.json", "chat_template.jinja", "merges.txt")
SIGNING = ("cryptography", "cyclonedx", "model_signing", "OpenSSL", "securesystemslib", "sigstore_models")
COPIED_STEMS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "spiece")


def assemble(build: Path, include: Include, license: License | None = None) -> None:
    """Add the bundle's extra files and bundle.json to a build.

    `include` says which programs the bundle has, and `license` is the checkpoint's, None if it is not known.
    Raises ShardmillError if a file of the build is not as it was made.
    """
    check_build(build)
    copies = [
        path for path in sorted((build / SOURCE).iterdir()) if path.name in COPIED or path.name.startswith(COPIED_STEMS)
    ]
    for path in copies:
        with replacing(build / path.name) as temporary:
            shutil.copyfile(path, temporary)
    write_bom(build, license)
    hashes = {name: hash_file(build / name) for name in (BOM, *(path.name for path in copies))}
    left_out = sorted(
        name
        for name in records(build)
        if may_be_absent(name, include) and not is_signature(name) and name not in (BUNDLE, CARD_RECORD)
    )
    write_json(build / BUNDLE, sealed({"include": include, "files": hashes, "left_out": left_out}))


def check_build(build: Path, cache: HashCache | None = None) -> None:
    """Raise ShardmillError, naming the first file that is wrong, unless every file of a build is as it was made."""
    wrong = audit(build, cache).wrong
    if wrong:
        (name, what), *others = wrong
        more = f" (and {len(others)} more)" if others else ""
        raise ShardmillError(f"{build / name}: {what}{more}; `shardmill verify {build}` tells all")


def bundle_files(build: Path) -> list[str]:
    """Return every file of an assembled build that leaves the machine, with signatures, sorted."""
    content = added(build)
    known = {name for name in records(build) if name not in content["left_out"]}
    beside = {path.relative_to(build).as_posix() for path in (*build.iterdir(), *build.glob("attestations/*"))}
    return sorted(name for name in known | set(filter(is_signature, beside)) if (build / name).is_file())


def unsigned(build: Path, signed: Iterable[str]) -> set[str]:
    """Return the names in a build that a signature over the signed files must ignore.

    A folder's name replaces the names of its files if the signature must ignore every file in the folder.
    """
    wanted = set(signed)
    folders = {parent.as_posix() for name in wanted for parent in Path(name).parents}
    return set(_outside(build, build, wanted, folders))


def _outside(folder: Path, build: Path, wanted: set[str], folders: set[str]) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        name = path.relative_to(build).as_posix()
        if name in folders and not path.is_symlink():
            yield from _outside(path, build, wanted, folders)
        elif name not in wanted:
            yield name


def remove_marks(build: Path) -> None:
    """Remove the marks that Snakemake leaves in folders; Snakemake then uses the folder's own time."""
    for mark in build.rglob(SNAKEMAKE_MARK):
        mark.unlink()


@contextmanager
def signing_libraries() -> Iterator[None]:
    """Import an extra's packages inside the block. Raises ShardmillError with the remedy if one is missing."""
    try:
        yield
    except ImportError as error:
        if str(error.name).partition(".")[0] in SIGNING:
            raise ShardmillError(f"{error.name} is not installed; in a clone: pip install -e '.[sign]'") from error
        raise


def write_bom(build: Path, license: License | None) -> None:
    """Write a build's bill of materials; `license` is the checkpoint's, None if it is not known."""
    with signing_libraries():
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import ComponentType
        from cyclonedx.output.json import JsonV1Dot6

    statement = read_provenance(build / ATTESTATION)
    rows = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    model = _model(statement, rows, license)
    tools = list(_tools(rows))
    bom = Bom(
        serial_number=uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_URL, HOME), hash_file(build / ATTESTATION)),
        metadata=BomMetaData(component=model),
        components=[*(_file(row, ComponentType.FILE) for row in statement["subject"]), *tools],
    )
    bom.register_dependency(model, tools)
    content = parse_json(JsonV1Dot6(bom).output_as_string())
    del content["metadata"]["timestamp"]
    write_json(build / BOM, content)


def _model(statement: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], license: License | None) -> Component:
    """Return the built model as a component, with the checkpoint as its ancestor."""
    from cyclonedx.model.component import Component, ComponentType, Pedigree

    config = statement["predicate"]["buildDefinition"]["externalParameters"]["config"]
    inner = [_file(row, ComponentType.DATA) for row in rows if row["name"].startswith(f"{SOURCE}/")]
    source = next((row for row in rows if row["name"] == SOURCE), None)
    url = PackageURL.from_string(source["uri"]) if source else None
    ancestor = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=url.name if url else config["source"].get("path", SOURCE),
        group=url.namespace if url else None,
        version=url.version if url else None,
        purl=url,
        bom_ref=SOURCE,
        licenses=_license(license),
        components=inner,
    )
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=config["model"],
        bom_ref="model",
        licenses=_license(license),
        pedigree=Pedigree(ancestors=[ancestor], notes=f"Core ML programs, {called(config['convert']).lower()} weights"),
    )


def _file(row: Mapping[str, Any], kind: Any) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component

    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=row["digest"]["sha256"])]
    return Component(type=kind, name=row["name"], bom_ref=f"{kind.value} {row['name']}", hashes=hashes)


def _tools(rows: Iterable[Mapping[str, Any]]) -> Iterator[Component]:
    """Yield the packages that ran, with the licenses that their metadata names."""
    from cyclonedx.model.component import Component, ComponentType

    for row in rows:
        if row.get("uri", "").startswith("pkg:pypi/") and row["name"] != "workflow":
            url = PackageURL.from_string(row["uri"])
            same = installed(url.name) == url.version
            expression = str(metadata.metadata(url.name).json.get("license_expression") or "") if same else ""
            yield Component(
                type=ComponentType.LIBRARY,
                name=url.name,
                version=url.version,
                purl=url,
                bom_ref=row["uri"],
                licenses=_license(License(expression) if expression else None),
            )


def _license(license: License | None) -> list[Any]:
    """Return a license in the library's form: an SPDX identifier or expression, or a name."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.spdx import fixup_id

    if license is None:
        return []
    text = license.name or license.id
    return [LicenseFactory().make_from_string(fixup_id(text) or text)]  # hubs write SPDX's identifiers in lower case
