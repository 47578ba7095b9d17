"""The tests' hub, and a client of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from .hub_case import CHUNK, Case
from .hub_server import Hub, running
from .samples import two_file_checkpoint


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = two_file_checkpoint() | {"README.md": b"# tiny", "modeling.py": b"raise SystemExit", "source.json": b"{}"}
    with running(files) as served:
        yield served


@pytest.fixture
def case(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The client writes in small chunks, so that a small file has several, and retries at once."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    return Case(tmp_path, hub)
