"""model_type qwen3: Qwen3-Embedding and Qwen3-Reranker, whose tokens see no later token.

Source of the arithmetic: transformers, models/qwen3/modeling_qwen3.py. An embedding is the last token's hidden state. A
reranker is asked whether a document meets a query and answers with its next token, "yes" or "no"; the question is
spelled as the model card of Qwen/Qwen3-Reranker-0.6B spells it.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ROPE, SLIDING_MASK, EncoderIO, ModelDescription
from shardmill.models.decoder import attention_biases, graph_of, kinds_by_type
from shardmill.models.encoder import HEAD, TEXT_TASKS, Names, encoder, encoder_activation, task_of
from shardmill.models.families.qwen2 import WINDOWS
from shardmill.models.rotary import rope

AROUND = {"embedding": "model.embed_tokens.weight", "norm": "model.norm"}
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def describe(config: Any, length: int) -> ModelDescription:
    """Return the description of a transformers Qwen3Config for passes of at most `length` tokens."""
    kinds = kinds_by_type(config.layer_types, length, config.sliding_window)
    slides = any(kind.mask == SLIDING_MASK for kind in kinds)
    ropes = {ROPE: rope(config, length)}
    graph = graph_of(
        config,
        ropes,
        activation=encoder_activation(config, "hidden_act"),
        qk_norm="before",
        **attention_biases(config),
    )
    return encoder(
        config,
        length,
        (*WINDOWS, "attention_bias"),
        Names("model.layers.{i}.", {}, AROUND, ignored=(HEAD,)),
        graph,
        EncoderIO(final_norm=True),
        kinds=kinds,
        ropes=ropes,
        band=config.sliding_window - 1 if slides else None,
        task=task_of(config, TEXT_TASKS),
        tied=bool(config.tie_word_embeddings),
        causal=True,
        template=TEMPLATE,
        instruction=INSTRUCTION,
    )
