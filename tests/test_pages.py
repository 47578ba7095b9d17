"""Links of the pages lead to files and headings that exist, and so do the names of files and classes."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

from snakemake.cli import get_argument_parser

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "lab", "configs", "resources", "portable")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if re.match(r"\w+:", target):
                continue
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or (heading and file.suffix == ".md" and heading not in anchors(file)):
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert len(PAGES) > 20 and not lost


def snakemake_commands(page: Path) -> list[str]:
    """The commands that a page shows or mentions: what follows on a line, or stands between two backticks."""
    text = re.sub(r"\\\n", " ", page.read_text(encoding="utf-8"))
    lines = re.findall(r"^(?: {4})?(?:[A-Z_]+=\S+ )*(snakemake [^`\n]*)$", text, re.MULTILINE)
    return [*lines, *(" ".join(found.split()) for found in re.findall(r"`(snakemake [^`]*)`", text))]


def test_no_target_of_a_documented_command_is_taken_for_a_config() -> None:
    """Snakemake's --configfile takes every word that follows, up to the next option."""
    count, wrong = 0, []
    for page in PAGES:
        for command in snakemake_commands(page):
            if "--configfile " not in command:
                continue
            words = shlex.split(command, comments=True)[1:]
            given = [str(name) for name in get_argument_parser().parse_args(words).configfile]
            count += 1
            taken = [name for name in given if name != "FILE" and not name.endswith((".yaml", ".yml"))]
            wrong += [f"{page.relative_to(ROOT)}: {' '.join(taken)}: {command}"] if taken else []
    assert count > 15 and not wrong


def test_what_no_apple_hardware_has_run_is_said_first() -> None:
    """On README's first screen, on top of the Mac's page, and row by row, until a result from a Mac is recorded."""
    page = (ROOT / "docs/what-has-run-where.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for claim in ("Core ML loads", "every operation", "the speed on", "a Mac's packages", "Kubernetes", "NFS"):
        (row,) = (row for row in rows if row.startswith(f"| {claim}"))
        assert row.split(" | ")[1].startswith("not run"), row
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Build the demo")[0]
    top = (ROOT / "docs/on-a-mac.md").read_text(encoding="utf-8").partition("## ")[0]
    assert "**No Mac, iPhone or iPad has run it yet.**" in first and "(docs/what-has-run-where.md)" in first
    assert "**Nothing on this page has run on a Mac yet**" in top and "(what-has-run-where.md)" in top


# Names of our own files and classes, in pages and docstrings.

CODE = ("shardmill", "portable", "tests", "tools", "benchmarks", "scripts", "swift", "hatch_build.py")
OURS = {file for name in CODE for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))}
# A docstring that names one of these may name their files; they are read in another place than here.
OTHERS = re.compile(r"transformers|coremltools|SafeAILab|vLLM|vllm|PEFT|peft|speculators|ExecuTorch")
FOREIGN = {
    "file_download.py": "huggingface_hub's",
    "utils/_http.py": "huggingface_hub's",
    "torch/jit/_trace.py": "PyTorch's",
    "Host": "a header of HTTP",
    "Infrequent": "a value of Core ML's",
    "LanguageModel": "a protocol of AnyLanguageModel",
    "MinJobAge": "a setting of Slurm",
    "RateLimit": "a header of HTTP",
    "ResolutionImpossible": "an error of pip",
    "TorchConverter": "a class of coreai-torch",
}
A_FILE, A_CLASS = re.compile(r"[\w./-]*\w\.py\b"), re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)*")


def is_ours(name: str) -> bool:
    """Return whether a file has that name, or a path that ends so; a name in capitals stands for any."""
    return Path(name).stem.isupper() or any(file.as_posix().endswith(f"/{name}") for file in OURS)


def test_files_in_docstrings_exist() -> None:
    lost = []
    for file in sorted(OURS):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                said = ast.get_docstring(node) or ""
                named = [] if OTHERS.search(said) else A_FILE.findall(said)
                lost += [f"{file.relative_to(ROOT)}: {name}" for name in named if not is_ours(name)]
    assert len(OURS) > 500 and lost == []


def test_files_and_classes_in_pages_exist() -> None:
    python = {
        node.name for file in OURS for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)
    }
    swift = "".join(file.read_text() for folder in ("swift", "swift-any") for file in (ROOT / folder).rglob("*.swift"))
    kinds = re.findall(r"\b(?:class|struct|enum|actor|protocol) (\w+)", swift)
    products = re.findall(r'name: "(\w+)"', (ROOT / "Package.swift").read_text())
    classes, lost = {*python, *kinds, *products, *(file.name for file in ROOT.iterdir())}, []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for name in {*re.findall(r"`([^`\n]+)`", text)} - FOREIGN.keys():
            known = is_ours(name) if A_FILE.fullmatch(name) else name in classes or not A_CLASS.fullmatch(name)
            lost += [] if known else [f"{page.relative_to(ROOT)}: {name}"]
    assert lost == []
