"""model_type gemma3: the text tower of a multimodal Gemma 3 (4B, 12B, 27B). Its vision tower is left out.

`load_hf_config` hands over the tower's own config, so this family is gemma3_text under other names of tensors.
"""

from __future__ import annotations

from shardmill.models.families.gemma3_text import describe

__all__ = ["describe"]
