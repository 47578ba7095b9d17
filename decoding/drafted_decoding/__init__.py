"""Decoding over an engine: sessions, drafters, acceptance, width control, sampling.

The package needs only an `Engine` (engine.py). It knows nothing of Core ML files, and imports nothing of shardmill.
"""

from drafted_decoding.constraint import Constraint, Grammar, GrammarTokenizer, JsonSchema, LeastLength
from drafted_decoding.decide import LabelCalibration, LabelScores, label_probabilities, score_labels
from drafted_decoding.drafters import DRAFTERS, Drafter, create_drafter
from drafted_decoding.drafters.learned import LearnedDrafter
from drafted_decoding.engine import DecodeError, Engine, NotFiniteError, PlainEngine
from drafted_decoding.generate import generate, run
from drafted_decoding.layout import ContextPolicy, choose_layout
from drafted_decoding.policies import POLICIES, DraftPolicy, create_policy, measure_widths
from drafted_decoding.prefixes import PrefixCache
from drafted_decoding.request import FinishReason, GenerationResult, Options, PrefillEvent, PromptLogprob, TokenEvent
from drafted_decoding.sampler import SEEDS, Sampling
from drafted_decoding.session import Session, SetAside, check_prompt
from drafted_decoding.text import Detokenize

__version__ = "0.1.0"

__all__ = [
    "DRAFTERS",
    "POLICIES",
    "SEEDS",
    "LeastLength",
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
    "PromptLogprob",
    "Sampling",
    "Session",
    "SetAside",
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
