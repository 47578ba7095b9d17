"""One folder for the templates that all tests of a run convert: coremltools converts each once, not in every file.

What a template depends on is in its name, and the library stays the same while the tests run. Tests that change it, or
count conversions, have a folder of their own.
"""

from __future__ import annotations

import shared

FOLDER = shared.FOLDER / "templates"
FOLDER.mkdir(exist_ok=True)
