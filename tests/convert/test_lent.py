"""Programs of an assistant: caches that the model lends are inputs of a part that has none."""

from __future__ import annotations

from pathlib import Path

import assistants
import pytest
import templates
import tiny
from oracle import convert_plain

from shardmill.convert.stamped import convert_stamped
from shardmill.models.interface import FIXED, HOST, EntryPoints
from shardmill.plan import Part

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]
CALLS = (EntryPoints(state=HOST), EntryPoints(FIXED, (1, 4), HOST))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Part]]:
    folder = tmp_path_factory.mktemp("assistant")
    checkpoint = assistants.write(assistants.target(vocab=tiny.VOCAB), folder / "checkpoint")
    tiny.train_tokenizer().save(str(checkpoint / "tokenizer.json"))
    source = tiny.fetched(checkpoint, folder / "source")
    helper = assistants.assistant(vocab_size=tiny.VOCAB)
    tiny.fetched(assistants.write(helper, folder / "assistant"), source / "drafter")
    settings = {"drafter": {"path": str(folder / "assistant")}, "topology": "auto", "program": assistants.STATE}
    return source, tiny.split(source, **settings)[0]


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.shapes)
@pytest.mark.parametrize("name", ["draft_fuse", "draft_layers"])
def test_a_package_is_what_coremltools_makes(
    parts: tuple[Path, dict[str, Part]], tmp_path: Path, name: str, calls: EntryPoints
) -> None:
    source, part = parts[0], parts[1][name].changed(calls=calls)
    convert_plain(part, source, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")
