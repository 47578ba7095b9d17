"""Chat templates as their models' authors publish them, which are not part of this repository.

    python tests/serve/published.py FOLDER     # takes them from packages that have them; SHARDMILL_TEMPLATES=FOLDER

Each has the package or the repository that it was read from, its file there, and its digest.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

TEMPLATES = "SHARDMILL_TEMPLATES"  # a folder with NAME.jinja
TRL, BFCL = "trl==1.16.0", "bfcl-eval==2026.3.23"
DAY = date(2026, 11, 29)


@dataclass(frozen=True)
class Published:
    """Where a template is from.

    Attributes:
        model: whose template it is.
        source: the package, or the repository and its commit.
        file: the file there.
        sha256: of the template.
    """

    model: str
    source: str
    file: str
    sha256: str


PUBLISHED = {
    "qwen3": Published(
        "Qwen/Qwen3-*",
        TRL,
        "trl/chat_templates/qwen3.jinja",
        "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    ),
    "qwen3.5": Published(
        "Qwen/Qwen3.5-4B",
        TRL,
        "trl/chat_templates/qwen3_5_think.jinja",
        "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
    ),
    "qwen3.6": Published(
        "Qwen/Qwen3.6-27B",
        TRL,
        "trl/chat_templates/qwen3_6.jinja",
        "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
    ),
    "llama-3.2": Published(
        "meta-llama/Llama-3.2-*",
        TRL,
        "trl/chat_templates/llama3_2.jinja",
        "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4",
    ),
    "gpt-oss": Published(
        "openai/gpt-oss-*",
        TRL,
        "trl/chat_templates/gptoss.jinja",
        "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146",
    ),
    "lfm2": Published(
        "LiquidAI/LFM2-1.2B at 40f3da0",
        TRL,
        "trl/chat_templates/lfm2_v2.jinja",
        "5504d163d879bfb6fd4135b7fa3d56768b2e69dd718338f7b146750289f46ab0",
    ),
    "lfm2.5": Published(
        "LiquidAI/LFM2.5-230M at 13a5383",
        TRL,
        "trl/chat_templates/lfm2_2_5_v2.jinja",
        "c5b67247c9f736f6c40eaa91ae1ef27dc67f5b041eedaadb97a1bea5030fb0ff",
    ),
    "gemma3": Published(
        "google/gemma-3-*",
        TRL,
        "trl/chat_templates/gemma3.jinja",
        "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4",
    ),
    "gemma4": Published(
        "google/gemma-4-E2B-it at 8995379",
        TRL,
        "trl/chat_templates/gemma4_v5.jinja",
        "0a2c8073c878ab1da004bee933a998606537bbb62016310352c7285c3f01c5b5",
    ),
    "deepseek-r1": Published(
        "deepseek-ai/DeepSeek-R1-Distill-*",
        TRL,
        "trl/chat_templates/deepseek_r1_distill.jinja",
        "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f",
    ),
    "phi-4-mini": Published(
        "microsoft/Phi-4-mini-instruct",
        BFCL,
        "bfcl_eval/model_handler/local_inference/phi.py",
        "febf589225c9728ab791f52e8897d7607a823d45368f0a4c92fa68997b40cce9",
    ),
    "smollm3": Published(  # in no package; the text of `smollm3`, as Swift reads the literal
        "HuggingFaceTB/SmolLM3-3B",
        "github.com/johnmai-dev/Jinja at bb238dd96fbe4c18014f3107c00edd6edb15428e",
        "Tests/Templates/ChatTemplates.swift",
        "e6143bdf3129c6b2a9ac4b6304076041fbb2f6ac39a66172519f18075f0a2a6c",
    ),
}


def template(name: str) -> str | None:
    """Return a template; None if the folder lacks it."""
    folder = os.environ.get(TEMPLATES)
    file = Path(folder, f"{name}.jinja") if folder else None
    if file is None or not file.is_file():
        return None
    content = file.read_bytes()
    assert hashlib.sha256(content).hexdigest() == PUBLISHED[name].sha256, f"{file} is another template"
    return content.decode()


def fetch(folder: Path) -> None:
    """Take the templates that packages have, and say which are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for package in (TRL, BFCL):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, package]
            subprocess.run(command, check=True)
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name, one in PUBLISHED.items():
                    if one.file in archive.namelist():
                        (folder / f"{name}.jinja").write_text(_text(archive.read(one.file).decode(), one.file))
    for name, one in PUBLISHED.items():
        if not (folder / f"{name}.jinja").is_file():
            print(f"{name} is missing: it is in {one.file} of {one.source}")


def _text(content: str, file: str) -> str:
    """Return the template in a file, which may be the first `chat_template` of a comment in Python."""
    if file.endswith(".py"):
        found = re.search(r'"chat_template": "(.*)"', content)
        assert found
        return found[1]
    return content


def conversations(name: str, texts: list[str], *, told: bool) -> Iterator[list[dict[str, Any]]]:
    """Draw 100 conversations: up to 4 answers, with thoughts in some, and a system message in half if there may be one.

    Args:
        name: decides what is drawn.
        texts: what messages are put together from.
        told: whether there is a place for a system message.
    """
    drawn = random.Random(name)

    def text() -> str:
        return "".join(drawn.choice(texts) for _ in range(drawn.randrange(4)))

    for _ in range(100):
        talk: list[dict[str, Any]] = [{"role": "system", "content": text()}] if told and drawn.random() < 0.5 else []
        for _ in range(drawn.randrange(5)):
            talk.append({"role": "user", "content": text()})
            talk.append({"role": "assistant", "content": text()})
            if drawn.random() < 0.3:
                talk[-1] |= {"content": "An answer.", "reasoning_content": "Hm.", "thinking": "Hm."}
        yield [*talk, {"role": "user", "content": text()}]


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
