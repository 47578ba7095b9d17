"""model_type gemma4: the text tower of a multimodal Gemma 4 (E2B, E4B). Its other towers are left out.

The arithmetic, the options and the names of tensors within the tower are gemma4_text's.
"""

from __future__ import annotations

from shardmill.models.families.gemma4_text import describe

__all__ = ["describe"]
