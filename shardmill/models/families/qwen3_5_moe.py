"""model_type qwen3_5_moe: the text tower of a multimodal Qwen3.5 with experts. Its vision tower is left out.

`load_hf_config` hands over the tower's own config, so this family is qwen3_5_moe_text under other names of tensors.
"""

from __future__ import annotations

from shardmill.models.families.qwen3_5_moe_text import describe

__all__ = ["describe"]
