"""model_type gemma4_unified: the text tower of a unified Gemma 4 (12B). Its other towers are left out.

The arithmetic, the options and the names of tensors within the tower are gemma4_text's.
"""

from __future__ import annotations

from shardmill.models.families.gemma4_text import describe

__all__ = ["describe"]
