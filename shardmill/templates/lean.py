"""Keeps PyTorch out of the process that renders templates. That process imports this module first, and no other does.

transformers would import PyTorch for its tokenizers too, where it is installed: 180 MB that no template needs. It says
so if it finds none, and warns of things in a config that concern a model alone.
"""

from __future__ import annotations

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # what is None here counts as not installed
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
