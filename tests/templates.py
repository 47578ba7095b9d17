"""One folder for the samples that all tests of a run convert: coremltools converts each once, not once in every file.

What a sample depends on is in its name, and the library stays the same while the tests run. Tests that change it, or
count conversions, have a folder of their own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

NAME = "SHARDMILL_TESTS_TEMPLATES"  # pytest's workers inherit it from the process that started them
_IS_OURS = NAME not in os.environ
if _IS_OURS:
    os.environ[NAME] = tempfile.mkdtemp(prefix="shardmill-templates-")
FOLDER = Path(os.environ[NAME])


def remove() -> None:
    """Removes it, in the process that made it."""
    if _IS_OURS:
        shutil.rmtree(FOLDER, ignore_errors=True)
