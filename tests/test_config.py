"""shardmill.config: a config that can't be built from is refused in one line, before any work."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shardmill import config
from shardmill.errors import ConfigError
from shardmill.models.hf_config import SIZES

ROOT = Path(__file__).parent.parent
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
    "unknown key": ({"contxt": 5}, "contxt: unknown key"),
    "unknown nested key": ({"tokens": {"maximum": 4}}, "tokens.maximum: unknown key"),
    "no token": ({"tokens": {"max": 0}}, "tokens.max: input should be greater than or equal to 1, is 0"),
    "too many tokens": ({"tokens": {"max": 65}}, "tokens.max: input should be less than or equal to 64, is 65"),
    "more drafts than a pass holds": (
        {"tokens": {"max": 4, "verify": 8}},
        "tokens.verify: 8 is over tokens.max, 4",
    ),
    "no decoding": ({"tokens": {"verify": 0}}, "tokens.verify: input should be greater than or equal to 1, is 0"),
    "a pass that no gate would see": (
        {"tokens": {"max": 64}, "parity": {"positions": 32}},
        "parity.positions: 32 tokens, by which no gate would see a pass of 64; set it to tokens.max or more",
    ),
    "enumerated shapes beside states": (
        {"program": {"shapes": "enumerated"}},
        "program.shapes: Core ML refuses enumerated shapes beside states (rule D5); add `state: host`",
    ),
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
    "no commit": ({"source": {"repo": "owner/name"}}, "source.revision: needs the repository's commit"),
    "a branch": (
        {"source": {"repo": "owner/name", "revision": "main"}},
        "source.revision: needs the repository's commit",
    ),
    "a path's commit": ({"source": {"path": "x", "revision": COMMIT}}, "source.revision: only a repo has one"),
    "no such folder": ({"source": {"path": "nowhere"}}, "source.path: nowhere holds no config.json"),
    "a drafter that is gone": (
        {"benchmark": {"drafters": ["ngram", "mixed"]}},
        "benchmark.drafters.1: input should be 'none', 'ngram', 'suffix' or 'learned'",
    ),
    "a name that leaves build/": ({"model": "../m"}, "model: string should match pattern"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_in_one_line(name: str) -> None:
    """Each mistake is refused by the line that names its key, and a right config is not."""
    changes, expected = WRONG[name]
    assert refusal(settings(**changes)).startswith(expected)
    config.parse(settings())


def test_a_missing_key_is_named() -> None:
    """A required key that is left out is an error that names it."""
    content = settings()
    del content["context"]
    assert refusal(content) == "context: missing"


def test_a_missing_commit_comes_with_the_command_that_prints_it() -> None:
    """The line that demands a commit says how to get it, for this very repository."""
    line = refusal(settings(source={"repo": "some/model"}))
    assert "git ls-remote https://huggingface.co/some/model HEAD" in line


def test_several_mistakes_are_all_named() -> None:
    """One run tells of every key that is wrong, not of the first only."""
    line = refusal(settings(contxt=5, tokens={"max": 0}))
    assert "contxt: unknown key" in line
    assert "tokens.max" in line


def test_a_local_checkpoint_is_held_against_the_context(tmp_path: Path) -> None:
    """More slots than the model has positions are refused before anything runs."""
    config.parse(local(tmp_path))
    refused = refusal(local(tmp_path, max_position_embeddings=63))
    assert refused == "context: 64 is over the model's 63 positions"


def test_a_model_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    line = refusal(local(tmp_path, model_type="gpt_2"))
    assert line.startswith(f"{tmp_path}/config.json: model_type 'gpt_2' is not supported; supported: ")
    assert {"llama", "phi3"} <= set(re.findall(r"\w+", line))


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_a_size_that_is_null_stands_for_its_default(tmp_path: Path, name: str) -> None:
    """What that is, only transformers knows: the split step asks it."""
    content = local(tmp_path, head_dim=None, **{name: None})
    config.parse(content)


def test_a_negative_layer_is_one_error() -> None:
    """That its list has no sound item left follows from it and is not said."""
    assert refusal(settings(topology=[[-1, 2]])).count(";") == 0


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, "4", True, 1.5])
def test_a_size_that_is_none_is_named(tmp_path: Path, name: str, value: Any) -> None:
    """A model of no heads divides by zero somewhere else."""
    assert f"{name} is {value!r}: it must be 1 or more" in refusal(local(tmp_path, **{name: value}))


@pytest.mark.parametrize(("reader", "what"), [("shardmill.regular.os.open", "config.json"), ("os.listdir", "")])
def test_a_checkpoint_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, what: str
) -> None:
    content = local(tmp_path)

    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as closed:
        closed.setattr(reader, refuse)
        found = refusal(content)
    assert found == f"source.path: {tmp_path / what} can't be read: Permission denied"


def test_a_checkpoint_s_config_that_is_not_utf8(tmp_path: Path) -> None:
    content = local(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    assert refusal(content).startswith(f"{tmp_path}/config.json: not JSON")


def test_the_config_of_a_model_is_found_among_broken_files(tmp_path: Path) -> None:
    """A file that is no config is not the one that was asked for."""
    (tmp_path / "a.yaml").write_text("model: [unclosed\ncontext: 5\n")
    (tmp_path / "b.yaml").write_text("- model\n- m\n")
    (tmp_path / "c.yaml").write_bytes(b"model: \xff")
    (tmp_path / "d.yaml").write_text("model: m\n")
    assert config.find("m", tmp_path) == tmp_path / "d.yaml"
    with pytest.raises(ConfigError, match="none names the model n"):
        config.find("n", tmp_path)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    """A missing file, one that is no YAML and one that is no mapping each give one line that names the file."""
    broken, plain, binary = (tmp_path / f"{name}.yaml" for name in ("broken", "plain", "binary"))
    binary.write_bytes(b"model: \xff\xfe")
    broken.write_text("model: [unclosed\ncontext: 5\n")
    plain.write_text("just words")
    for file in (tmp_path / "missing.yaml", broken, plain, binary):
        with pytest.raises(ConfigError) as caught:
            config.load(file)
        assert str(caught.value).startswith(f"{file}: ")
        assert "\n" not in str(caught.value)


def test_parts_and_widths() -> None:
    """Parts are named as the rules name their files, in the order of a pass; T = 1, verify and max are widths."""
    c = config.parse(settings(topology=[[0, 20], [20, 24]], head={"slices": 2}))
    assert c.parts == ("layers_00_20", "layers_20_24", "head_0", "head_1")
    assert c.widths == (1, 4)
    for tokens, widths in (
        ({"max": 1}, (1,)),
        ({"max": 3}, (1, 3)),
        ({"max": 64}, (1, 8, 64)),
        ({"max": 6}, (1, 6)),
        ({"max": 64, "verify": 8}, (1, 8, 64)),
        ({"max": 16, "verify": 1}, (1, 16)),
        ({"max": 16, "verify": 16}, (1, 16)),
    ):
        assert config.parse(settings(tokens=tokens)).widths == widths


def test_what_is_left_open_has_no_parts_yet() -> None:
    """Left out or `auto`; either of the two is enough to know no names of parts."""
    for changes in ({"topology": "auto"}, {"head": {"slices": "auto"}}):
        c = config.parse(settings(head={"slices": 2}) | changes)
        assert not c.is_settled
        with pytest.raises(ConfigError, match="auto is not settled yet"):
            len(c.parts)
    content = settings()
    del content["topology"]
    assert (config.parse(content).topology, config.parse(content).head.slices) == ("auto", "auto")
    assert config.parse(settings(head={"slices": 2})).is_settled


def test_the_demo_config_is_valid() -> None:
    """The config that is built by default loads, and is the 20+4+6+2 topology with four head slices."""
    c = config.load(ROOT / "configs/demo.yaml", ROOT)
    assert [end - start for start, end in c.ranges] == [20, 4, 6, 2]
    assert len(c.parts) == 8
    for text in (c.parity.text, c.benchmark.text):
        assert (ROOT / text).is_file()


FROM_THE_HUB = {
    file.stem: content
    for file in sorted((ROOT / "configs").glob("*.yaml"))
    if "repo" in (content := yaml.safe_load(file.read_text()))["source"]
}


@pytest.mark.parametrize("name", FROM_THE_HUB)
def test_a_config_for_the_hub_lacks_only_its_commit(name: str) -> None:
    """It demands a commit, with one it is valid, and its comment names the command for this very repository."""
    content = copy.deepcopy(FROM_THE_HUB[name])
    if content["source"]["revision"] is None:
        assert refusal(content).startswith("source.revision: needs the repository's commit")
    content["source"]["revision"] = COMMIT
    assert config.parse(content).model == name
    command = f"git ls-remote https://huggingface.co/{content['source']['repo']} HEAD"
    assert command in (ROOT / f"configs/{name}.yaml").read_text()
    assert f"`{name}.yaml` | `{content['source']['repo']}`" in (ROOT / "configs/README.md").read_text()


def test_phi_4_mini_is_among_them() -> None:
    assert FROM_THE_HUB["phi-4-mini"]["source"]["repo"] == "microsoft/Phi-4-mini-instruct"


def test_the_schema_file_is_the_code_s() -> None:
    """configs/schema.json, which editors read, is what the dataclasses say."""
    text = (ROOT / "configs/schema.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(config.schema())), "write config.schema() to configs/schema.json"


@pytest.mark.parametrize("name", ["unknown key", "unknown nested key", "no token", "no parts"])
def test_the_schema_refuses_too(name: str) -> None:
    """An editor that follows the schema marks what the schema can express, and accepts a right config."""
    schema = config.schema()
    jsonschema.validate(settings(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(settings(**WRONG[name][0]), schema)


def documented() -> dict[str, str]:
    """key -> default of the table in configs/README.md; an empty default where there is none."""
    rows = re.findall(r"^\| `([\w.]+)` \|([^|]*)\|", (ROOT / "configs/README.md").read_text(), re.MULTILINE)
    return {key: default.strip(" `") for key, default in rows if not key.endswith(".yaml")}


def described(schema: dict[str, Any], node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """key -> default of every leaf of the schema; None where there is none."""
    found = {}
    for name, child in node["properties"].items():
        if "$ref" in child:
            found |= described(schema, schema["$defs"][child["$ref"].rpartition("/")[2]], f"{prefix}{name}.")
        else:
            found[prefix + name] = child.get("default")
    return found


def test_every_key_is_documented_with_its_default() -> None:
    """configs/README.md lists the keys that there are, with the defaults that they have, and no others."""
    schema = config.schema()
    expected = described(schema, schema)
    defaults = {key: "" if value is None else json.dumps(value).strip('"') for key, value in expected.items()}
    assert documented() == defaults
