"""model_type qwen3_asr: the text tower of Qwen3-ASR, a Qwen3. Its tower for sounds is in models/towers.

`load_hf_config` hands over the tower's own config, so this family is qwen3 under other names of tensors.
"""

from __future__ import annotations

from shardmill.models.families.qwen3 import describe

__all__ = ["describe"]
