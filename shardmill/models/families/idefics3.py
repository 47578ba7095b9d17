"""model_type idefics3: the text tower of granite-docling and Idefics3, a Llama. Its vision tower is in models/towers.

`load_hf_config` hands over the tower's own config, so this family is llama under other names of tensors.
"""

from __future__ import annotations

from shardmill.models.families.llama import describe

__all__ = ["describe"]
