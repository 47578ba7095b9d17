"""One's own model, from a repository on a hub to a chat in a browser, by what each command says comes next."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
from browser import browser
from checkpoint.hub_server import COMMIT, REPO, running
from patience import BUILDING, PATIENCE, wait_until
from pipeline.project import COPIED, PACKAGES, ROOT, python_path, share_templates
from processes import succeeded

from shardmill.machine import engine_name

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
STARTS = {"shardmill": ["-c", "from shardmill.cli import main; main()"], "snakemake": ["-m", "snakemake"]}


def checkpoint(folder: Path) -> dict[str, bytes]:
    """Two layers of random weights, with a chat template."""
    tiny.write_checkpoint(folder, layers=2)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def clone(folder: Path) -> Path:
    """A folder with what a clone has that a build reads."""
    folder.mkdir()
    for name in (*COPIED, "resources"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, folder / name)
    share_templates(folder)
    return folder


class Terminal:
    """In a clone, by a hub: what one types there, and what is shown."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self.told, opener = clone(folder / "clone"), folder / "address", folder / "opener"
        opener.write_text(f'#!/bin/sh\necho "$1" > {self.told}.part && mv {self.told}.part {self.told}\n')
        opener.chmod(0o755)
        own = {"PYTHONPATH": python_path(self.folder, *PACKAGES), "OMP_NUM_THREADS": "1", "BROWSER": str(opener)}
        own |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint}
        self.environment = os.environ | own

    def words(self, line: str) -> list[str]:
        """A command as one types it, with this Python's programs."""
        program, *rest = shlex.split(line)
        return [sys.executable, *STARTS[program], *rest]

    def shown(self, line: str) -> list[str]:
        """The lines that a command shows until it has ended well."""
        done = subprocess.run(
            self.words(line),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=BUILDING,
        )
        succeeded(done)
        print(f"$ {line}\n{done.stdout}")  # for whoever wants to read the whole screen: pytest -s
        return done.stdout.splitlines()

    @contextmanager
    def in_browser(self, line: str) -> Iterator[str]:
        """The address that a command opens in the browser; Ctrl-C ends it."""
        with subprocess.Popen(self.words(line), cwd=self.folder, env=self.environment) as serving:
            try:
                wait_until(lambda: self.told.exists() or serving.poll() is not None)
                assert serving.poll() is None, line
                yield self.told.read_text().strip()
                serving.send_signal(signal.SIGINT)
                assert serving.wait(PATIENCE) == 130  # as after any Ctrl-C
            finally:
                serving.kill()


@pytest.mark.slow
@pytest.mark.pipeline
def test_two_commands_lead_from_a_repository_to_a_chat_in_a_browser(tmp_path: Path) -> None:
    """Nothing is edited between them, and the hub is asked for each file of weights once."""
    with running(checkpoint(tmp_path / "checkpoint")) as hub:
        terminal = Terminal(tmp_path, hub.endpoint)
        made = terminal.shown(f"shardmill new hf:{REPO}")
        assert f"shardmill: wrote configs/tiny.lock: {REPO} main at {COMMIT[:7]}" in made
        _, build = made[-1].split("next: ")
        assert build == "snakemake --cores 4 all --configfile configs/tiny.yaml"
        built = terminal.shown(build)
        _, chat = built[-1].split("next: ")
        assert chat == "shardmill chat build/tiny" and built[-2] == "shardmill: report: build/tiny/report.html"
        weights = [name for name in hub.files if name.endswith(".safetensors")]
        assert weights and [len(hub.downloads(name)) for name in weights] == [1] * len(weights)
    with terminal.in_browser(f"{chat} --web") as address, browser(tmp_path / "browser") as page:
        page.open(address)
        page.wait("!document.querySelector('#ask').hidden")
        page.evaluate("document.querySelector('#text').focus()")
        page.type("def add(a, b):")
        page.press("Enter")
        page.wait("document.querySelector('article:last-child .took')")
        assert f"{engine_name()} engine" in page.text(".took") and page.text(".assistant .text")
        assert not page.text(".wrong")
        assert all(error.endswith("/health") for error in page.errors)  # 503 while programs are loading
        print(page.evaluate("document.body.innerText"))
