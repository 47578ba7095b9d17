"""What is published of configs is what the code says: those that come with the project, their schema, and the table."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml
from portable_coreml.run import ane

from shardmill import config

from .wrong import ROOT, WRONG, settings


def test_the_demo_config_is_valid() -> None:
    """The config that is built by default loads, and is the 20+4+6+2 topology with four head slices."""
    c = config.load(ROOT / "configs/demo.yaml", ROOT)
    assert [end - start for start, end in c.ranges] == [20, 4, 6, 2]
    assert len(c.parts) == 8
    for text in (c.parity.text, *([c.benchmark.text] if c.benchmark else [])):
        assert (ROOT / text).is_file()


FROM_THE_HUB = {
    file.stem: content
    for file in sorted((ROOT / "configs").glob("*.yaml"))
    if "repo" in (content := yaml.safe_load(file.read_text()))["source"]
}


@pytest.mark.parametrize("name", FROM_THE_HUB)
def test_a_config_for_the_hub_is_whole(name: str) -> None:
    """It builds as it is: its commit comes into a lock."""
    content = FROM_THE_HUB[name]
    assert content["source"].keys() == {"repo"}
    assert config.parse(content).model == name
    assert f"`{name}.yaml` | `{content['source']['repo']}`" in (ROOT / "configs/README.md").read_text()


def test_what_the_catalog_reads_is_a_link_to_what_configs_has() -> None:
    """So a config's row stands in one place, and not in a copy that falls behind."""
    linked = {"README.md": "README.md", "config.yaml": "demo.yaml", "schema.json": "schema.json"}
    for name, file in linked.items():
        assert (ROOT / "config" / name).readlink().as_posix() == f"../configs/{file}"


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
        sections = [form["$ref"] for form in (child, *child.get("oneOf", [])) if "$ref" in form]
        if sections:
            found |= described(schema, schema["$defs"][sections[0].rpartition("/")[2]], f"{prefix}{name}.")
        else:
            found[prefix + name] = child.get("default")
    return found


def test_every_key_is_documented_with_its_default() -> None:
    """configs/README.md lists the keys that there are, with the defaults that they have, and no others."""
    schema = config.schema()
    expected = described(schema, schema)
    defaults = {key: "" if value is None else json.dumps(value).strip('"') for key, value in expected.items()}
    assert documented() == defaults


def test_a_config_takes_the_options_that_the_portable_engine_has() -> None:
    for precision in ("ane", f"ane:{','.join(ane.OPTIONS)}", *(f"ane:{option}" for option in ane.OPTIONS)):
        assert config.parse(settings(predict=[precision])).predict == (precision,)
