"""Adapters behind the server, asked for by OpenAI's own client: MODEL:ADAPTER, as vLLM spells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import adapters
import limits
import openai
import pytest
import tiny
from shared import once

from shardmill.machine import is_portable
from shardmill.runtime.adding import add_adapter
from shardmill.serve.model import load_model

from .running import Running, running

pytestmark = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
PROMPT, COUNT = "def loads(s, *, cls=None", 10
LABELS = [" not", "None", " return"]
SHARES = limits.logprobs(limits.model(tiny.LAYERS, tiny.FFN), 2, tiny.VOCAB)


@pytest.fixture(scope="module")
def build() -> Path:
    return once("adapters-served", lambda folder: adapters.build(folder, "phi3", adapters.FIXED | {"labels": LABELS}))


@pytest.fixture(scope="module")
def told(build: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What transformers says by the model's name; the build gets two adapters."""
    tokens = tiny.train_tokenizer().encode(PROMPT).ids
    found = {"tiny": adapters.greedy(tiny.transformers_model(build / "source"), tokens, COUNT)}
    for seed, name in enumerate(("first", "second"), start=1):
        lora = adapters.write_lora(build / "source", tmp_path_factory.mktemp(name), seed, 0.25)
        add_adapter(build, lora, name)
        found[f"tiny:{name}"] = adapters.greedy(adapters.merged(build / "source", lora), tokens, COUNT)
    assert len({tuple(said) for said in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def up(build: Path) -> Iterator[Running]:
    with running(load_model(build, None, "fp32")) as server:
        yield server


def said(up: Running, model: str) -> str:
    """A greedy completion, and the model that the answer names."""
    answer = up.client().completions.create(model=model, prompt=PROMPT, max_tokens=COUNT, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def test_two_adapters_and_the_bare_model_answer_in_turns(up: Running, told: dict[str, list[int]]) -> None:
    tokenizer = tiny.train_tokenizer()
    for name in (*told, *reversed(told), "tiny:first", "tiny:first", "tiny"):
        wanted = told[name][: told[name].index(0)] if 0 in told[name] else told[name]
        assert said(up, name) == tokenizer.decode(wanted)


def test_an_adapter_decides_alike_by_either_head(up: Running, told: dict[str, list[int]]) -> None:
    """In turns with others, over a beginning that all texts share and each adapter keeps."""
    texts, found = [PROMPT, f"{PROMPT}, object_hook", f"{PROMPT}):"], {}
    for name in (*told, *told):
        for logprobs in (False, True):
            body = {"model": name, "input": texts, "labels": LABELS, "logprobs": logprobs}
            status, answer = up.post(body, "/v1/decide")
            assert status == 200, answer
            rows = [{one["label"]: one["probability"] for one in row["labels"]} for row in answer["data"]]
            for row, other in zip(rows, found.setdefault(name, rows), strict=True):
                limits.numbers_agree(f"{name}, log-probabilities {logprobs}", row, other, SHARES, size=1)
    assert len({json.dumps(rows) for rows in found.values()}) == len(told)


def test_models_lists_adapters_beside_their_base(up: Running, told: dict[str, list[int]]) -> None:
    models = up.client().models.list().data
    assert [one.id for one in models] == [*told]
    assert [getattr(one, "parent", None) for one in models] == [None, "tiny", "tiny"]
    assert up.client().models.retrieve("tiny:second").id == "tiny:second"


@pytest.mark.parametrize("name", ["tiny:", "tiny:third", "other:first", "tiny:first:second", "first", "tiny:../source"])
def test_other_names_are_not_found(up: Running, told: dict[str, list[int]], name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' and 'tiny:first' and 'tiny:second' are"):
        said(up, name)
    with pytest.raises(openai.NotFoundError):
        up.client().models.retrieve(name)


def test_a_damaged_adapter_fails_alone(up: Running, told: dict[str, list[int]], build: Path) -> None:
    add_adapter(build, adapters.write_lora(build / "source", build / "lora", 5), "worn")
    file = build / "adapters/worn/adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    try:
        before = said(up, "tiny:first")
        with pytest.raises(openai.BadRequestError, match="is not the file that was added; add it again"):
            said(up, "tiny:worn")
        file.unlink()
        with pytest.raises(openai.BadRequestError, match=r"can't be read: .*; add it again"):
            said(up, "tiny:worn")
        assert said(up, "tiny:first") == before
    finally:
        file.unlink(missing_ok=True)
        file.with_name("adapter.json").unlink()
