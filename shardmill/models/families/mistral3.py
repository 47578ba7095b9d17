"""model_type mistral3: the text tower of a multimodal Ministral 3. Its vision tower is left out.

`load_hf_config` hands over the tower's own config, so this family is ministral3 under other names of tensors.
"""

from __future__ import annotations

from shardmill.models.families.ministral3 import describe

__all__ = ["describe"]
