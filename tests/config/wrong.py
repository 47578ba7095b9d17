"""Configs for tests: a right one, wrong ones with what is said of each, and the line that refuses one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill import config
from shardmill.errors import ConfigError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"repo": "owner/name", "revision": COMMIT}


def settings(**changes: Any) -> dict[str, Any]:
    """A config for a checkpoint on the hub, with changes."""
    return {"model": "m", "source": HUB, "context": 64, "topology": [[0, 2], [2, 4]], **changes}


def local(folder: Path, **numbers: Any) -> dict[str, Any]:
    """A config for a checkpoint in `folder`, which gets a config.json with changed numbers."""
    shape = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64, "vocab_size": 256, **numbers}
    (folder / "config.json").write_text(json.dumps(shape))
    return settings(source={"path": str(folder)})


def refusal(content: Any) -> str:
    """The one line with which `content` is refused."""
    with pytest.raises(ConfigError) as caught:
        config.parse(content, "some.yaml")
    line = str(caught.value)
    assert line.startswith("some.yaml: ")
    assert "\n" not in line
    return line.removeprefix("some.yaml: ")


SEARCH = {"precision": "search", "calibration": {"text": "a.txt"}, "budget": {"perplexity": 1.03}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"contxt": 5}, "contxt: unknown key; did you mean context?"),
    "unknown key like no other": ({"quantum": 5}, "quantum: unknown key"),
    "unknown nested key": ({"tokens": {"maximum": 4}}, "tokens.maximum: unknown key; did you mean tokens.max?"),
    "no token": ({"tokens": {"max": 0}}, "tokens.max: input should be greater than or equal to 1, is 0"),
    "too many tokens": ({"tokens": {"max": 65}}, "tokens.max: input should be less than or equal to 64, is 65"),
    "more drafts than a pass holds": (
        {"tokens": {"max": 4, "verify": 8}},
        "tokens.verify: 8 is over tokens.max, 4",
    ),
    "images of no patches": ({"images": {"patches": []}}, "images.patches: tuple should have at least 1 item"),
    "images of one size twice": ({"images": {"patches": [64, 64]}}, "images.patches: names one size twice"),
    "images in another form": (
        {"images": {"form": "int4"}},
        "images.form: input should be 'fp16' or 'int8', is 'int4'",
    ),
    "images beside a drafter": (
        {"images": {}, "drafter": "mtp"},
        "images: a build has them without `drafter`; leave one of the two out",
    ),
    "sounds of one size twice": ({"audio": {"frames": [800, 800]}}, "audio.frames: names one size twice"),
    "sounds of half a second": (
        {"audio": {"frames": [50]}},
        "audio.frames.0: input should be greater than or equal to 100, is 50",
    ),
    "sounds beside images": (
        {"audio": {}, "images": {}},
        "audio: no model that can be built takes images as well; leave one of the two out",
    ),
    "sounds beside a drafter": (
        {"audio": {}, "drafter": "mtp"},
        "audio: a build has them without `drafter`; leave one of the two out",
    ),
    "no decoding": ({"tokens": {"verify": 0}}, "tokens.verify: input should be greater than or equal to 1, is 0"),
    "a pass that no gate would see": (
        {"tokens": {"max": 64}, "parity": {"positions": 32}},
        "parity.positions: with 32 tokens no gate would see a pass of 64; set it to tokens.max or more",
    ),
    "enumerated shapes beside states": (
        {"program": {"shapes": "enumerated"}},
        "program.shapes: Core ML refuses enumerated shapes beside states (rule D5); add `state: host`",
    ),
    "bundles of a program's only function": (
        {"program": {"state": "host", "bundles": "each"}},
        "program.bundles: a program has one function only; add `shapes: fixed`",
    ),
    "adapters beside a range of shapes and states": (
        {"program": {"adapters": 8}},
        "program.adapters: Core ML refuses inputs of one shape beside a range of shapes and states (rule D3); add "
        "`shapes: fixed` or `state: host`",
    ),
    "adapters of a rank that is too large": (
        {"program": {"shapes": "fixed", "adapters": 65}},
        "program.adapters: input should be less than or equal to 64, is 65",
    ),
    "a label twice": ({"program": {"labels": [" yes", " no", " yes"]}}, "program.labels: names one label twice"),
    "a label of no letters": (
        {"program": {"labels": [""]}},
        "program.labels.0: string should have at least 1 character, is ''",
    ),
    "labels beside codes for the whole head": (
        {"program": {"labels": [" yes"]}, "convert": {"precision": "int4", "calibration": {"text": "a.txt"}}},
        "program.labels: codes of a calibration are chosen for the whole LM head; leave one of the two out",
    ),
    "an adapter to merge that is not there": (
        {"source": HUB | {"adapter": "no/such"}},
        "source.adapter: no/such: no such folder; give a folder with adapter_config.json and adapter_model.safetensors",
    ),
    "an adapter of a drafter": (
        {"drafter": HUB | {"adapter": "a"}},
        "drafter.adapter: a drafter has none; leave it out",
    ),
    "a hint on shapes that never change": (
        {"program": {"shapes": "fixed", "reshape_frequency": "frequent"}},
        "program.reshape_frequency: a function of `shapes: fixed` has one shape only; leave it out",
    ),
    "a spelling that there is not": (
        {"program": {"silu": "sigmoid"}},
        "program.silu: input should be 'native' or 'tanh', is 'sigmoid'",
    ),
    "an emulation that there is not": (
        {"predict": ["ane:tables,exp"]},
        "predict.0: string should match pattern",
    ),
    "bundles that would share a state": (
        {"program": {"shapes": "fixed", "bundles": "each"}},
        "program.bundles: separate bundles do not share a state; add `state: host`",
    ),
    "lengths that do not ascend": (
        {"program": {"shapes": "fixed", "contexts": [32, 16]}},
        "program.contexts: [32, 16] do not ascend",
    ),
    "a length that is no shorter": (
        {"program": {"shapes": "fixed", "contexts": [64]}},
        "program.contexts: 64 is not shorter than the context of 64",
    ),
    "a length for no pass": (
        {"program": {"shapes": "fixed", "contexts": [2]}},
        "program.contexts: 2 slots do not hold a pass of tokens.max, 4",
    ),
    "lengths of flexible shapes": (
        {"program": {"contexts": [32]}},
        "program.contexts: need a function for each length; add `shapes: fixed`",
    ),
    "lengths without a number": (
        {"program": {"shapes": "fixed", "contexts": [0]}},
        "program.contexts.0: input should be greater than or equal to 1, is 0",
    ),
    "the name of the page over all models": ({"model": "index.html"}, "model: build/index.html is the workflow's own"),
    "the name of what can't be built": ({"model": "refused"}, "model: build/refused is the workflow's own"),
    "a name that leaves no room": ({"model": "m" * 101}, "model: a name has at most 100 characters, this has 101"),
    "no head": ({"head": {"slices": 0}}, "head.slices: input should be greater than or equal to 1, is 0"),
    "unknown precision": (
        {"convert": {"precision": "int3"}},
        "convert.precision: int3 is none of fp16, int8, int4, search, and no file",
    ),
    "search without a text": (
        {"convert": {"precision": "search", "budget": {"perplexity": 1.03}}},
        "convert.calibration: missing; the search measures on its text what each form costs",
    ),
    "search without a budget": (
        {"convert": {"precision": "search", "calibration": {"text": "a.txt"}}},
        "convert.budget: give one of perplexity, bytes_per_token, bits_per_weight",
    ),
    "a budget without end": (
        {"convert": {"precision": "search", "calibration": {"text": "a.txt"}, "budget": {"perplexity": float("inf")}}},
        "convert.budget.perplexity: input should be less than or equal to 1.2",
    ),
    "a budget that no form keeps to": (
        {"convert": {"precision": "search", "calibration": {"text": "a.txt"}, "budget": {"bits_per_weight": 3.0}}},
        "convert.budget.bits_per_weight: 3 is less than any form has; int4 is least",
    ),
    "a recipe that the build itself makes": (
        {"convert": {"precision": "build/x/../m/precision.json"}},
        "convert.precision: build/x/../m/precision.json is made by this build; copy it to another place",
    ),
    "calibration of nothing": (
        {"convert": {"precision": "int8", "calibration": {"text": "a.txt"}}},
        "convert.calibration: chooses codes of int4, a form that int8 gives no matrix; leave it out",
    ),
    "windows of a token": (
        {"convert": {"precision": "int4", "calibration": {"text": "a.txt", "window": 1}}},
        "convert.calibration.window: input should be greater than or equal to 8, is 1",
    ),
    "two budgets": (
        {
            "convert": {
                "precision": "search",
                "calibration": {"text": "a.txt"},
                "budget": {"perplexity": 1.03, "bits_per_weight": 5.0},
            }
        },
        "convert.budget: give one of perplexity, bytes_per_token, bits_per_weight",
    ),
    "a budget without a search": (
        {"convert": {"budget": {"perplexity": 1.03}}},
        "convert.budget: is for precision: search",
    ),
    "a form that there is not": (
        {"convert": SEARCH | {"search": {"forms": ["int8", "int3"]}}},
        "convert.search.forms: int3: no form of a matrix; there are fp16, int8, int4, palette4",
    ),
    "a form twice": (
        {"convert": SEARCH | {"search": {"forms": ["int8", "int8"]}}},
        "convert.search.forms: names one form twice",
    ),
    "no form": ({"convert": SEARCH | {"search": {"forms": []}}}, "convert.search.forms: "),
    "fewer than no points": (
        {"convert": SEARCH | {"search": {"measured": -1}}},
        "convert.search.measured: input should be greater than or equal to 0, is -1",
    ),
    "forms without a search": (
        {"convert": {"search": {"forms": ["int8"]}}},
        "convert.search: is for precision: search",
    ),
    "a perplexity that shrinks": (
        {"convert": {"precision": "search", "calibration": {"text": "a.txt"}, "budget": {"perplexity": 0.9}}},
        "convert.budget.perplexity: input should be greater than 1, is 0.9",
    ),
    "both names of the precision": (
        {"convert": {"weights": "int8", "precision": "int4"}},
        "convert.weights: is the old name of convert.precision; keep that alone",
    ),
    "a method of conversion that is gone": (
        {"convert": {"method": "plain"}},
        "convert.method: is gone, since every part is stamped; leave it out",
    ),
    "no parts": ({"topology": []}, "topology: "),
    "another word": ({"topology": "even"}, "topology: input should be a valid tuple, is 'even'"),
    "slices by name": ({"head": {"slices": "few"}}, "head.slices: input should be a valid integer, is 'few'"),
    "experts by another name": ({"experts": "sparse"}, "experts: input should be 'dense' or 'routed', is 'sparse'"),
    "no group of experts": ({"experts": 0}, "experts: input should be greater than or equal to 1, is 0"),
    "gap": ({"topology": [[0, 2], [3, 4]]}, "topology: layer 2 is in no part"),
    "gap at the start": ({"topology": [[1, 4]]}, "topology: layer 0 is in no part"),
    "wide gap": ({"topology": [[0, 1], [3, 4]]}, "topology: layers 1..2 are in no part"),
    "tokens true": ({"tokens": {"max": True}}, "tokens.max: input should be a valid integer, is True"),
    "tokens text": ({"tokens": {"max": "4"}}, "tokens.max: input should be a valid integer, is '4'"),
    "tokens float": ({"tokens": {"max": 4.0}}, "tokens.max: input should be a valid integer, is 4.0"),
    "layer text": ({"topology": [[0, "4"]]}, "topology.0.1: input should be a valid integer, is '4'"),
    "overlap": ({"topology": [[0, 3], [2, 4]]}, "topology: [2, 4] overlaps the part before it, which ends at 3"),
    "empty part": ({"topology": [[0, 2], [2, 2]]}, "topology: [2, 2] holds no layer"),
    "no source": ({"source": {}}, "source: give either path"),
    "two sources": ({"source": {**HUB, "path": "x"}}, "source: give either path"),
    "a branch without a name": (
        {"source": {"repo": "owner/name", "revision": ""}},
        "source.revision: string should have at least 1 character, is ''",
    ),
    "random weights that are not made yet": (
        {"model": "phi-4-mini-synthetic", "source": {"path": "nowhere"}},
        "source.path: nowhere holds no config.json; give a folder in Hugging Face layout; make it: "
        "shardmill synth-checkpoint --like configs/phi-4-mini.yaml nowhere",
    ),
    "a path's commit": ({"source": {"path": "x", "revision": COMMIT}}, "source.revision: only a repo has one"),
    "no such folder": ({"source": {"path": "nowhere"}}, "source.path: nowhere holds no config.json"),
    "a drafter that is gone": (
        {"benchmark": {"drafters": ["ngram", "mixed"]}},
        "benchmark.drafters.1: input should be 'none', 'ngram', ",
    ),
    "a benchmark that is only asked for": (
        {"benchmark": True},
        "benchmark: input should be False, is True",
    ),
    "a name that leaves build/": ({"model": "../m"}, "model: string should match pattern"),
}
