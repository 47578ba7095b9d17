"""model_type gemma4_unified_text: Gemma 4 of the unified models (12B), text only.

The arithmetic, the options and the names of tensors within the tower are gemma4_text's.
"""

from __future__ import annotations

from shardmill.models.families.gemma4_text import describe

__all__ = ["describe"]
