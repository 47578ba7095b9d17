"""What a kit asks a system before it measures builds, from the limits that only others have reported.

The questions come in the order of what their answers would change here: first the size of parts, which decides how
many programs every model has, then results that may be wrong, then speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kit_runner.questions import answers, key, on_engine
from portable_coreml.judge.limits import LONG_PASS, SCORES, SYSTEMS, WEIGHT_BYTES, WRONG_LENGTHS, limits

_GIB = 1 << 30
_STEP = _GIB // 100  # bytes below and above a limit
_DOWN = {"inputs": 8192, "outputs": 3072}  # of Phi-4-mini's down_proj, the widest input of a shipped config's layer
_PREFILL = (64, 128)  # tokens at which a deep input is reported slow


def _weights() -> Iterator[dict[str, Any]]:
    for most in sorted({limit.most for limit in WEIGHT_BYTES}):
        for size in (most + _STEP, most - _STEP):
            yield {"name": f"{size / _GIB:.2f} GiB", "kind": "weights", "bytes": size, "beside_cpu": True}


def _scores() -> Iterator[dict[str, Any]]:
    most = min(limit.most for limit in SCORES)
    side = int(most**0.5)  # queries as many as keys
    for queries, keys in ((side + 1, side + 1), (side, side), (64, most // 64 + 1), (64, most // 64)):
        yield {"name": f"{queries} x {keys}", "kind": "scores", "queries": queries, "keys": keys}


def _lengths() -> Iterator[dict[str, Any]]:
    first, last = WRONG_LENGTHS[0], WRONG_LENGTHS[-1]
    for tokens in (first - 1, first, last, last + 1, 520, LONG_PASS):
        yield {"name": f"{tokens}", "kind": "scores", "heads": 4, "queries": tokens, "keys": tokens, "window": 256}


def _deep() -> Iterator[dict[str, Any]]:
    for tokens in _PREFILL:
        for pieces in (1, 4):
            name = f"{tokens} tokens, input {'whole' if pieces == 1 else f'in {pieces} pieces'}"
            yield {"name": name, "group": tokens, "kind": "deep", "tokens": tokens, "pieces": pieces, **_DOWN}


def _shapes() -> Iterator[dict[str, Any]]:
    for tokens in (1, 4):
        for most in (4, 0):
            name = f"{tokens} tokens, {f'shapes from 1 to {most}' if most else 'fixed shapes'}"
            yield {"name": name, "group": tokens, "kind": "shapes", "tokens": tokens, "most": most, "bytes": _GIB // 4}


def questions() -> list[dict[str, Any]]:
    """Return the questions of a kit, as kit.json has them."""
    asked = (
        ("weights", "Programs of what size run on the Neural Engine?", "the size of parts", _weights(), False),
        ("scores", "Scores of how many queries and keys are right?", "queries in pieces (S9)", _scores(), False),
        ("lengths", "Encoders of what length are right?", "the buckets of encoders (S11, S12)", _lengths(), False),
        ("deep", "Is a deep input faster in pieces?", "the form of down_proj", _deep(), True),
        ("shapes", "What do flexible shapes cost?", "program.shapes", _shapes(), True),
    )
    return [
        {"name": name, "text": text, "decides": decides, "probes": [*probes], "compares": compares}
        for name, text, decides, probes, compares in asked
    ]


def told(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a result of measure.py says of its questions, a line for each, and where it contradicts a limit."""
    questions = content.get("questions")
    if questions is None:
        return
    yield from answers(questions["asked"], questions["measurements"])
    machine = content["machine"]
    name = next((s for s in SYSTEMS if s == f"{machine['os']} {machine['system'].partition('.')[0]}"), None)
    sizes = next((one for one in questions["asked"] if one["name"] == "weights"), None)
    if name is not None and sizes is not None and content["engine"]["name"] == "coreml":
        yield from _contradictions(name, sizes, questions["measurements"])


def _contradictions(system: str, asked: Mapping[str, Any], lines: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sizes that the Neural Engine takes against the limit of this system, or does not take within it."""
    limit = limits(system).weight_bytes
    for place, probe in enumerate(asked["probes"]):
        line = lines.get(key(asked["name"], place))
        if line is None or line["status"] not in ("ok", "wrong"):
            continue
        takes = on_engine(line)
        if takes != (probe["bytes"] <= limit.most):
            said = f"the limit is {limit.most / _GIB:.2f} GiB here (rule {limit.rule}, confidence {limit.confidence})"
            yield f"{system}: {'takes' if takes else 'does not take'} {probe['name']}, while {said}"
