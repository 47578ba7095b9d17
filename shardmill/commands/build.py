"""How commands take a build: a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Build = Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")]
