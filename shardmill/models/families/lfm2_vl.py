"""model_type lfm2_vl: the text tower of LFM2-VL, an LFM2. Its vision tower is in models/towers.

`load_hf_config` hands over the tower's own config, so this family is lfm2 under other names of tensors.
"""

from __future__ import annotations

from shardmill.models.families.lfm2 import describe

__all__ = ["describe"]
