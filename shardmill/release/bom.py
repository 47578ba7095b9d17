"""A bill of materials in CycloneDX (https://cyclonedx.org): the model, its checkpoint, the tools, and their licenses.

It repeats the facts of provenance.json in a format for inventory tools. Every run writes the same bytes: the serial
number is derived from the provenance, and there is no timestamp.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packageurl import PackageURL

from shardmill.attest import HOME, installed, read_provenance
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import parse_json, write_json
from shardmill.forms.recipe import called
from shardmill.pipeline.audit import ATTESTATION
from shardmill.pipeline.task import SOURCE
from shardmill.release.publishable import License

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

MODULES = ("cryptography", "cyclonedx", "model_signing", "OpenSSL", "securesystemslib", "sigstore_models")


@contextmanager
def signing_libraries() -> Iterator[None]:
    """Import an extra's packages inside the block. Raises ShardmillError with the remedy if one is missing."""
    try:
        yield
    except ImportError as error:
        if str(error.name).partition(".")[0] in MODULES:
            raise ShardmillError(f"{error.name} is not installed; in a clone: pip install -e '.[sign]'") from error
        raise


BOM = "bom.cdx.json"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, HOME)


def write_bom(build: Path, license: License | None) -> None:
    """Write a build's bill of materials.

    Args:
        build: the build's folder.
        license: the checkpoint's license; None if it is not known.
    """
    with signing_libraries():
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.output.json import JsonV1Dot6

    statement = read_provenance(build / ATTESTATION)
    rows = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    model = _model(statement, rows, license)
    tools = list(_tools(rows))
    bom = Bom(
        serial_number=uuid.uuid5(NAMESPACE, hash_file(build / ATTESTATION)),
        metadata=BomMetaData(component=model),
        components=[*_files(statement["subject"]), *tools],
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


def _files(subjects: Iterable[Mapping[str, Any]]) -> Iterator[Component]:
    from cyclonedx.model.component import ComponentType

    yield from (_file(row, ComponentType.FILE) for row in subjects)


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
            found = str(metadata.metadata(url.name).json.get("license_expression") or "") if same else ""
            yield Component(
                type=ComponentType.LIBRARY,
                name=url.name,
                version=url.version,
                purl=url,
                bom_ref=row["uri"],
                licenses=_license(License(found) if found else None),
            )


def _license(license: License | None) -> list[Any]:
    """Return a license in the library's form: an SPDX identifier or expression, or a name."""
    from cyclonedx.contrib.license.factories import LicenseFactory

    if license is None:
        return []
    text = license.name or license.id
    return [LicenseFactory().make_from_string(_spelled(text))]


def _spelled(text: str) -> str:
    """Return an SPDX identifier in SPDX's spelling; hubs write identifiers in lower case."""
    from cyclonedx.spdx import fixup_id

    return fixup_id(text) or text
