"""model_type embedding_gemma2: the text tower of a multimodal EmbeddingGemma 2. Its other towers are left out.

The arithmetic, the options and the names of tensors within the tower are embedding_gemma2_text's.
"""

from __future__ import annotations

from shardmill.models.encoders.embedding_gemma2_text import describe

__all__ = ["describe"]
