"""The addresses that statements name: of shardmill, and of the pages that explain what stands in them."""

from __future__ import annotations

HOME = "https://github.com/shardmill/shardmill"
PAGE = f"{HOME}/blob/main/docs/attestations.md"
BUILD_TYPE = f"{PAGE}#build-type-v1"
BUILDER = f"{PAGE}#builder"
