"""Tutorials of docs/, one for each extension point, can be followed: what they name and show is what is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from drafted_decoding.drafters import EMPTY, Drafter

ROOT = Path(__file__).parent.parent
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def tutorials() -> dict[str, tuple[Path, str]]:
    """Return the page and the text of each section of docs/ whose heading begins with Add, by its heading."""
    found = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        headings = [*HEADING.finditer(text)]
        for i, heading in enumerate(headings):
            if heading[2].startswith("Add "):
                later = (other.start() for other in headings[i + 1 :] if len(other[1]) <= len(heading[1]))
                found[heading[2]] = page, text[heading.start() : next(later, len(text))]
    return found


TUTORIALS = tutorials()
COMMANDS = {
    " ".join(command.split()): name
    for name, (_, text) in TUTORIALS.items()
    for command in re.findall(r"(?:^ +|`)(pytest [^`]*?)(?=\n\n|`)", text, re.MULTILINE)
}


def test_each_extension_point_has_a_tutorial_of_at_most_80_lines() -> None:
    named = {"one", "a mixer", "a kind of part", "a gate", "a number to a gate", "a drafter", "a form"}
    assert {name.removeprefix("Add ") for name in TUTORIALS} == named
    assert {name: text.count("\n") for name, (_, text) in TUTORIALS.items() if text.rstrip().count("\n") > 80} == {}


def test_the_commits_that_tutorials_show_are_there() -> None:
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("no history")
    subjects = [one for _, text in TUTORIALS.values() for one in re.findall(r"git log -p --grep '(.+)'", text)]
    for subject in subjects:
        shown = subprocess.run(
            ["git", "log", "--format=%s", "--grep", subject], check=False, cwd=ROOT, capture_output=True, text=True
        )
        assert shown.stdout.count("\n") == 1, subject
    assert len(subjects) > 1


@pytest.mark.parametrize("name", TUTORIALS)
def test_what_a_tutorial_says_to_stand_in_a_file_stands_there(name: str) -> None:
    """`TINY` in `tests/models/tiny_configs.py`, or with a link in place of the file's name."""
    page, text = TUTORIALS[name]
    files = r"(?:\[`[^`]+`\]\(([^)#]+)\)|`([\w/]+/[\w.]+)`)"
    said = re.findall(rf"`(\w+)`(?: and `\w+`)? (?:in|of)\s+{files}", text)
    for word, link, path in said:
        file = page.parent / link if link else ROOT / path
        assert re.search(rf"\b{word}\b", file.read_text(encoding="utf-8")), f"{word} in {link or path}"
    assert said or name == "Add a gate"


def test_the_drafter_of_its_tutorial_drafts() -> None:
    text = TUTORIALS["Add a drafter"][1]
    example = re.search(r'^    """A drafter.*?(?=^\d\. )', text, re.MULTILINE | re.DOTALL)
    assert example
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example[0]), names)
    drafter: Drafter = names["RepeatDrafter"]()
    drafter.reset([7])
    drafter.observe([7, 9], 1)
    assert drafter.propose([7, 9], 3).tokens == (9, 9, 9) and drafter.propose([], 3) == EMPTY


def test_the_command_that_writes_the_schema_writes_what_is_there(tmp_path: Path) -> None:
    command = re.search(r"^ +python (-c .*config\.schema.*)$", TUTORIALS["Add a drafter"][1], re.MULTILINE)
    assert command
    (tmp_path / "configs").mkdir()
    subprocess.run([sys.executable, *shlex.split(command[1])], cwd=tmp_path, check=True)
    assert (tmp_path / "configs/schema.json").read_bytes() == (ROOT / "configs/schema.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_tutorial_finds_tests(command: str) -> None:
    """And as many as the tutorial says. NAME stands for the reader's own."""
    words = [word for word in shlex.split(command) if word != "NAME"]
    given = words[1:-1] if words[-1] == "-k" else words[1:]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", *given],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    _, text = TUTORIALS[COMMANDS[command]]
    said = re.search(r"You see `(\d+) passed`", text)
    if said and command in " ".join(text.partition(said[0])[0].split()):
        assert re.search(rf"\b{said[1]}(?:/\d+)? tests collected", done.stdout), done.stdout[-200:]
