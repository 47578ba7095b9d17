"""The vision tower of granite-docling and Idefics3 (transformers, models/idefics3/modeling_idefics3.py): SmolVLM's."""

from __future__ import annotations

from shardmill.models.towers.smolvlm import describe

__all__ = ["describe"]
