"""What a config leaves open is resolved by the model's config.json, once, and what can't be built is refused there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import encoders
import mtp_layers
import pytest
import tiny
from models import tiny_encoders
from models.tiny_families import write_tiny

from shardmill import config
from shardmill.checkpoint import hub
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.tokenizer import single_tokens
from shardmill.errors import CheckpointError, ConfigError
from shardmill.files import read_json
from shardmill.pipeline import resolve, resources
from shardmill.pipeline.steps.split import split

from .otherwise import WITHOUT, changed, leaves

HUB = {"repo": "a/b", "revision": "0" * 40}
OPEN = {"topology": "auto", "head": {"slices": "auto"}}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a checkpoint whose weights are not there, beside which the working folder is."""
    monkeypatch.chdir(tmp_path)
    tiny.hf_config().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def resolved(**changes: Any) -> config.Config:
    return resolve.resolve_config(config.parse(tiny.settings("checkpoint", **changes)), "a.yaml")


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def kept() -> list[Path]:
    return sorted(Path("build/.store/topologies").glob("*.json"))


def change(checkpoint: Path, **numbers: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | numbers))


@pytest.mark.usefixtures("checkpoint")
def test_what_is_left_open_becomes_numbers() -> None:
    chosen = resolved(**OPEN)
    assert (chosen.ranges, chosen.slices) == (((0, 4),), 1)
    assert chosen.parts == ("layers_00_04", "head_0")
    assert resolved(topology="auto").slices == 2
    assert resolved(head={}).ranges == ((0, 2), (2, 3), (3, 4))


def test_numbers_are_held_against_the_model(checkpoint: Path) -> None:
    assert refusal(topology=[[0, 3]]) == "a.yaml: topology: ends at layer 3, the model has 4"
    assert refusal(head={"slices": 3}).startswith("a.yaml: head.slices: 3 does not divide the vocabulary of 256")
    change(checkpoint, some_new_option=True)
    assert "some_new_option" in refusal()
    assert not kept()


def test_a_second_look_imports_nothing_heavy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Snakefile is parsed by every job of a build."""
    chosen = resolved(**OPEN)
    code = f"""
import sys
from collections.abc import Sequence
from pathlib import Path
from shardmill import config
from shardmill.pipeline import resolve
chosen = resolve.resolve_config(config.parse({tiny.settings("checkpoint", **OPEN)!r}), "a.yaml")
assert chosen.ranges == {chosen.ranges!r}
print([name for name in ("torch", "transformers", "coremltools", "huggingface_hub") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_whatever_decides_is_looked_at_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json, the config's own numbers, and the code that chooses."""
    resolved(**OPEN)
    resolved(**OPEN)
    assert len(kept()) == 1
    for more, changes in enumerate(({"context": 65}, {"convert": {"weights": "fp16"}}, {"topology": [[0, 4]]}), 2):
        resolved(**OPEN | changes)
        assert len(kept()) == more
    change(checkpoint, num_hidden_layers=3)
    assert resolved(**OPEN).ranges == ((0, 3),)
    monkeypatch.setattr(resolve, "_code", lambda: "other code")
    resolved(**OPEN)
    assert len(kept()) == 6


@pytest.mark.usefixtures("checkpoint")
def test_every_setting_is_in_the_key_of_what_is_kept() -> None:
    """A new one too: none is named here."""
    settings = config.parse(tiny.settings("checkpoint", **OPEN))
    files = {("convert", "precision"), ("source", "path")}  # which are read for the key
    paths = [path for path in leaves(settings) if path not in files]
    assert len(paths) > 30 and ("answers",) in paths and ("tokens", "verify") in paths
    known = resolve._key(settings)
    others = {path: changed(settings, path, WITHOUT.get(path[-1])) for path in paths}
    assert [path for path, other in others.items() if resolve._key(other) == known] == []


def test_every_file_that_is_read_is_in_the_key_of_what_is_kept(checkpoint: Path) -> None:
    """The names of a drafter's tensors stand in the headers of weights."""
    settings = config.parse(tiny.settings("checkpoint", **OPEN))
    keys = [resolve._key(settings)]
    for name, content in (
        ("config.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0{}weights"),
        ("model.safetensors", b"\3\0\0\0\0\0\0\0{ }weights"),
    ):
        (checkpoint / name).write_bytes(content)
        keys.append(resolve._key(settings))
    assert len({*keys}) == len(keys)


@pytest.mark.usefixtures("checkpoint")
def test_a_budget_out_of_reach_is_refused_though_another_was_settled() -> None:
    """Before any work, as where nothing is kept yet."""
    search = {"precision": "search", "calibration": {"text": "text.txt"}}
    resolved(**OPEN | {"convert": search | {"budget": {"bytes_per_token": 10**9}}})
    for changes in (
        {"budget": {"bytes_per_token": 1}},
        {"budget": {"perplexity": 2.0}, "search": {"forms": ["palette4/7"]}},
    ):
        with pytest.raises(ConfigError, match="convert"):
            resolved(**OPEN | {"convert": search | changes})


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"topology": 5, "slices": 1}'])
@pytest.mark.usefixtures("checkpoint")
def test_what_is_damaged_is_settled_again(damage: str) -> None:
    chosen = resolved(**OPEN)
    (file,) = kept()
    sound = file.read_text()
    file.write_text(damage)
    assert resolved(**OPEN) == chosen
    assert file.read_text() == sound


def test_of_a_repository_only_config_json_is_fetched_and_only_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(repo: str, revision: str | None, access: hub.HubAccess, locked: None) -> Path:
        asked.append((repo, revision))
        return checkpoint / "config.json"

    monkeypatch.setattr(hub, "download_config", download)
    for _ in range(2):
        assert resolved(source=HUB, **OPEN).ranges == ((0, 4),)
    assert asked == [("a/b", "0" * 40)]
    given = config.parse(tiny.settings("", source=HUB))
    assert resolve.resolve_config(given, "a.yaml") == given
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"program": {"shapes": "fixed", "contexts": [32]}}),
        ("llama", {"program": {"labels": ["None", " return"]}}),
        ("gemma3_text", {}),
        ("granitemoe", {}),
        ("granitemoe", {"experts": "routed"}),
        ("lfm2", {"tokens": {"max": 4}}),
        ("qwen3_5_text", {"tokens": {"max": 8}}),
        ("nemotron_h", {"tokens": {"max": 8}}),
    ],
)
def test_memory_is_expected_as_the_plan_says_it(
    model_type: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every part, and of the whole model, before there is a plan."""
    monkeypatch.chdir(tmp_path)
    source = tiny.fetched(write_tiny(model_type, tmp_path / "checkpoint"), tmp_path / "source")
    chosen = resolved(**OPEN, **changes)
    parts, plan = split(source, chosen, HashCache(tmp_path / "hashes"), read_json(source / "source.json")["files"])
    expected = resolve.expected(chosen)
    for name in (*(part.name for part in parts), None):
        assert resources.job_sizes(expected, 16, name) == resources.job_sizes(plan, 16, name)


def test_memory_is_expected_of_the_draft_vocabulary_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever was settled first; one that the model lacks is refused though another was settled."""
    monkeypatch.chdir(tmp_path)
    model = mtp_layers.target()
    mtp_layers.write(model, mtp_layers.drawn(model), tmp_path / "checkpoint")

    def parameters(vocab: int) -> int:
        chosen = resolved(**OPEN | {"drafter": "mtp", "head": {"slices": "auto", "draft_vocab_size": vocab}})
        found: int = {part["name"]: part for part in resolve.expected(chosen)["parts"]}["draft_head"]["parameters"]
        return found

    assert parameters(128) - parameters(48) == 80 * 64
    with pytest.raises(ConfigError, match="257 is over the model's 256 tokens"):
        parameters(257)


@pytest.mark.usefixtures("checkpoint")
def test_functions_of_a_program_share_what_the_engine_expands() -> None:
    """A function for each width and context takes no weights of its own, and a context its caches."""

    def held(**program: Any) -> tuple[int, int]:
        (first, *_) = resolve.expected(resolved(program=program, tokens={"max": 4}))["parts"]
        return first["expanded"], first["cached"]

    (expanded, cached), contexts = held(shapes="range"), [tiny.CONTEXT // 2]
    assert held(shapes="fixed") == (expanded, cached) > (0, 0)
    assert held(shapes="fixed", contexts=contexts) == (expanded, 3 * cached // 2)  # of which each context has its own


def test_memory_of_an_encoder_is_expected_as_the_plan_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one program for each bucket and in two, which take together what the one takes."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint")
    found = {}
    for count, changes in ((1, {}), (2, {"topology": [[0, 1], [1, 3]]})):
        source, parts, plan = encoders.parts_of(checkpoint, tmp_path / str(count), **changes)
        chosen = resolve.resolve_config(config.parse(tiny_encoders.settings(source, **changes)), "a.yaml")
        assert resolve.resolve_config(config.parse(tiny_encoders.settings(source, **changes)), "a.yaml") == chosen
        found[count] = {name: resources.job_sizes(plan, 16, name) for name in (*parts, None)}
        for name, each in found[count].items():
            assert resources.job_sizes(resolve.expected(chosen), 16, name) == each
    whole, (first, second) = found[1]["encoder_64"], (found[2][f"encoder_64_{ends}"] for ends in ("00_01", "01_03"))
    assert first.part + second.part == pytest.approx(whole.part) and first.part < second.part
    assert first.bucket == second.bucket == whole.bucket > found[2]["encoder_16_00_01"].bucket
    assert first.layer == pytest.approx(whole.layer) and found[1][None].model == pytest.approx(found[2][None].model)


def test_labels_are_held_against_a_tokenizer_until_they_fit_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is not read again, since reading a large tokenizer takes seconds. Another tokenizer is."""
    read: list[Path] = []

    def counted(file: Path, labels: Sequence[str]) -> list[int]:
        read.append(file)
        return single_tokens(file, labels)

    monkeypatch.setattr(resolve, "single_tokens", counted)
    tiny.train_tokenizer().save(str(checkpoint / "tokenizer.json"))
    wrong, fine = {"labels": [" return", " maybe"]}, {"labels": [" return"]}
    for _ in range(2):
        line = refusal(program=wrong, **OPEN)
        assert line.startswith("a.yaml: program.labels: ' maybe' is [' ")
        assert line.endswith(" after a line, not one separate token; leave it out")
        resolved(program=fine, **OPEN)
    assert len(read) == 3
    (checkpoint / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refusal(program=fine, **OPEN)


@pytest.mark.usefixtures("checkpoint")
def test_a_hub_that_is_not_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Path:
        raise CheckpointError("a/b: connection failed")

    monkeypatch.setattr(hub, "download_config", fail)
    assert refusal(source=HUB, **OPEN) == "a.yaml: a/b: connection failed"


def test_tokens_that_a_ring_does_not_hold_are_refused_though_fewer_were_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept of the one config is no answer to the other."""
    from models.tiny_configs import tiny_config

    monkeypatch.chdir(tmp_path)
    tiny_config("lfm2").save_pretrained(tmp_path / "checkpoint")
    open_ones = {"topology": "auto", "head": {"slices": 1}}
    assert resolved(**open_ones, tokens={"max": 30}).is_resolved
    assert "tokens.max: 31 is too many" in refusal(**open_ones, tokens={"max": 31})
