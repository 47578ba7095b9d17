"""Decoding over an engine: sessions, drafters, acceptance, width control, sampling.

The package needs only an `Engine` (engine.py). It does not depend on Core ML files, and imports nothing else of
shardmill.
"""

from shardmill.decode.constraint import Constraint, Grammar, GrammarTokenizer, JsonSchema
from shardmill.decode.decide import LabelCalibration, LabelScores, label_probabilities, score_labels
from shardmill.decode.drafters import DRAFTERS, Drafter, create_drafter
from shardmill.decode.drafters.learned import LearnedDrafter
from shardmill.decode.engine import DecodeError, Engine, NotFiniteError, PlainEngine
from shardmill.decode.generate import generate, run
from shardmill.decode.layout import ContextPolicy, choose_layout
from shardmill.decode.policies import POLICIES, DraftPolicy, create_policy, measure_widths
from shardmill.decode.prefixes import PrefixCache
from shardmill.decode.request import FinishReason, GenerationResult, Options, PrefillEvent, TokenEvent
from shardmill.decode.sampler import SEEDS, Sampling
from shardmill.decode.session import Session, check_prompt
from shardmill.decode.text import Detokenize

__all__ = [
    "DRAFTERS",
    "POLICIES",
    "SEEDS",
    "LabelCalibration",
    "Constraint",
    "ContextPolicy",
    "DecodeError",
    "NotFiniteError",
    "Detokenize",
    "DraftPolicy",
    "Drafter",
    "Engine",
    "FinishReason",
    "GenerationResult",
    "LearnedDrafter",
    "Grammar",
    "GrammarTokenizer",
    "JsonSchema",
    "LabelScores",
    "Options",
    "PlainEngine",
    "PrefillEvent",
    "PrefixCache",
    "Sampling",
    "Session",
    "TokenEvent",
    "check_prompt",
    "choose_layout",
    "create_drafter",
    "create_policy",
    "generate",
    "label_probabilities",
    "measure_widths",
    "run",
    "score_labels",
]
