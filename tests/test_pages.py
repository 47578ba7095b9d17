"""Links lead to files and headings that exist, names to things that exist, and what users meet has its place."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

from drafted_decoding import PrefixCache
from snakemake.cli import get_argument_parser
from typer.main import get_command

from shardmill.cli import app
from shardmill.serve.http import ENDPOINTS
from shardmill.serve.metrics import Metrics

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "lab", "configs", "resources", "decoding", "kit", "portable", "swift")
FOUND = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
PAGES = [page for page in FOUND if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)]  # no caches


@cache
def tracked() -> tuple[Path, ...]:
    """Return the repository's files."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    return tuple(ROOT / name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file())


def readable(file: Path) -> str:
    """Return a file's text; an empty one if it is not text, or data."""
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_size < 10**6 else ""
    except UnicodeDecodeError:
        return ""


def spans(page: Path) -> set[str]:
    """Return what stands between backticks in a page's text, outside of blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


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


def test_pictures_of_readme_exist_and_are_small() -> None:
    """`python tools/draw_pictures.py build/demo` draws them, light and dark."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = [ROOT / name for name in re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    assert len(pictures) == 4 and all(file.stat().st_size < 50_000 for file in pictures)


# A page of another project, which our code cites: its repository stands before it.
CITED = re.compile(r"(?:[\w.-]+/[\w.-]+|ANEForge|Anemll), $")


def test_pages_that_code_names_exist() -> None:
    """An error, a comment or the change log that names a page of docs/ or lab/, and a heading of it."""
    lost, count = [], 0
    for file in tracked():
        text = "" if file.suffix == ".md" and file.name != "CHANGELOG.md" else readable(file)
        for found in re.finditer(r"(?:(?<![\w/])|(?<=blob/main/))(?:docs|lab)/[\w.-]+\.md(?:#[\w-]+)?", text):
            page, _, heading = found[0].partition("#")
            if CITED.search(text[max(0, found.start() - 60) : found.start()]):
                continue
            count += 1
            if not (ROOT / page).exists() or (heading and heading not in anchors(ROOT / page)):
                lost.append(f"{file.relative_to(ROOT)}: {found[0]}")
    assert count > 50 and lost == []


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

CODE = (
    "shardmill",
    "exporters",
    "decoding",
    "kit",
    "portable",
    "tests",
    "tools",
    "lab",
    "scripts",
    "swift",
    "hatch_build.py",
)
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
    "Phi3ForCausalLM": "a class of transformers",
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
    swift = "".join(file.read_text() for file in (ROOT / "swift").rglob("*.swift"))
    kinds = re.findall(r"\b(?:class|struct|enum|actor|protocol|typealias) (\w+)", swift)
    products = re.findall(r'name: "(\w+)"', (ROOT / "Package.swift").read_text())
    classes, lost = {*python, *kinds, *products, *(file.name for file in ROOT.iterdir())}, []
    for page in PAGES:
        for name in spans(page) - FOREIGN.keys():
            known = is_ours(name) if A_FILE.fullmatch(name) else name in classes or not A_CLASS.fullmatch(name)
            lost += [] if known else [f"{page.relative_to(ROOT)}: {name}"]
    assert lost == []


# Words of docs/glossary.md, by their headings there, that stand for one thing wherever they are written.
WORDS = {
    **{word: f"{word}s?" for word in ("bundle", "drafter", "gate", "kit", "receipt", "recipe", "ring", "verdict")},
    "portable-engine": r"portable\s+engine",
    "residency": "residency",
}
NO_LINKS = ("ane-rules", "commands", "glossary", "upstream")
NO_PROSE = re.compile(
    r"^ *```.*?^ *```|^(?:#|\||    |<!--)[^\n]*|`[^`\n]+`|\[[^\]]*\]\((?!glossary\.md#)[^)]*\)",
    re.MULTILINE | re.DOTALL,
)


def test_the_first_use_of_a_word_of_the_glossary_is_a_link_to_it() -> None:
    """In sentences. The report of others' problems is to be sent, and two pages are lists."""
    unlinked = []
    for page in {*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / f"{name}.md" for name in NO_LINKS}:
        prose = NO_PROSE.sub("", page.read_text(encoding="utf-8"))
        for heading, spelled in WORDS.items():
            first = re.search(rf"(?<![\w-])(?:{spelled})(?![\w-])", prose, re.IGNORECASE)
            if first and not prose[first.end() :].startswith(f"](glossary.md#{heading})"):
                unlinked.append(f"{page.name}: {first[0]}")
    assert sorted(unlinked) == [] and WORDS.keys() <= anchors(ROOT / "docs/glossary.md")


# Names in pages that nothing of ours contains.
OTHERS_NAMES = {
    "_hf_hub_download_to_cache_dir": "huggingface_hub's",
    "_http_backoff_base": "huggingface_hub's",
    "snapshot_download": "huggingface_hub's",
    "Linked": "X-Linked-Etag, a header of HTTP",
    "hf_xet": "a package of huggingface_hub",
    "broadcasting_batch_matmul": "an operation of Core AI",
    "upsample_bilinear2d": "an operator of torch",
    "antialias": "an argument of torch's interpolate",
    "approximate": "an argument of torch's gelu",
    "kwinputs": "a field of coremltools' nodes",
    "f3_lut_m6": "a file of the M6 report",
    "06_numerics": "a folder of the M6 report",
    "sentence_bert_config": "a file of sentence-transformers",
    "3_Dense": "a folder of sentence-transformers",
    "target_parameters": "a key of PEFT",
    "modules_to_save": "a key of PEFT",
    "web_search": "a tool of OpenAI's",
    "local_shell": "a tool of OpenAI's",
    "abfs": "a file system of Azure's",
    "aws": "the folder ~/.aws",
    "AWS_PROFILE": "a variable of Amazon's",
    "sacct": "a command of Slurm",
    "scancel": "a command of Slurm",
    "srun": "a command of Slurm",
    "slurm_logs": "a folder of Snakemake's plugin",
    "--slurm-init-seconds-before-status-checks": "an option of Snakemake's plugin",
    "--slurm-no-account": "an option of Snakemake's plugin",
    "--slurm-status-command": "an option of Snakemake's plugin",
    "tmux": "a program",
    "local_lock": "an option of NFS",
    "--unix-socket": "an option of curl",
    "systemd-socket-activate": "a program of systemd",
    "multiple_choice": "a kind of task of lm-evaluation-harness",
    "loglikelihood_rolling": "a kind of task of lm-evaluation-harness",
    "generate_until": "a kind of task of lm-evaluation-harness",
    "num_concurrent": "an argument of lm-evaluation-harness",
    "moe": "a kind of layer of Nemotron-H's",
    "execution-model": "a folder of cadamcat's",
    "attest-build-provenance": "an action of GitHub's",
    "model-index": "a key of a hub's cards",
    "models--owner--name": "a folder of huggingface_hub's cache",
    "infer": "a name that another runtime may use",
    "pytorch_model": "a file of PyTorch's, which is refused",
    "audio": "a kind of a message's parts in OpenAI's API",
    "_trace": "a file of PyTorch's",
    "--extra-index-url": "an option of pip",
}
ALIASES = {"--max-tokens"}  # of --max-new-tokens
NAME = re.compile(r"-{0,2}\w[\w-]*")
EXAMPLES = re.compile(r"(layers|head|experts|front|c\d+)_[\dt_]+|t\d|[a-zA-Z_]+_I|[\w-]*[A-Z]{3,}|\d+|shardmill_\w+")


def options() -> dict[str, set[str]]:
    """Return every command's options, by their first long name."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
        if hasattr(command, "commands"):
            for word, inner in command.commands.items():
                yield from walk(inner, f"{name} {word}")
        else:
            named = [next((text for text in one.opts if text.startswith("--")), "") for one in command.params]
            yield name, {*named} - {"", "--help"}

    return dict(walk(get_command(app), "shardmill"))


def test_every_command_and_option_has_its_row() -> None:
    """And docs/commands.md names no other ones."""
    shown: dict[str, set[str]] = {}
    for row in re.findall(r"^\| `shardmill .*$", (ROOT / "docs/commands.md").read_text(), re.MULTILINE):
        first, *_, last = row.strip("| ").split(" | ") if row.count(" | ") > 1 else (*row.strip("| ").split(" | "), "")
        for command in re.findall(r"`(shardmill(?: [a-z][a-z-]+(?![\w/]))+)", first):
            shown[command] = set(re.findall(r"`(--[\w-]+)`", last))
    assert shown == options()


def test_commands_that_pages_show_exist_with_their_options() -> None:
    """In code, or at the beginning of a line of it. `shardmill serve --warm` must be an option of `serve`."""
    known, wrong, count = options(), [], 0
    alone = {one for command in get_command(app).params for one in command.opts}
    for page in PAGES:
        text = re.sub(r"\\\n", " ", page.read_text(encoding="utf-8"))
        code = re.findall(r"```bash\n(.*?)```|`([^`\n]+)`|^    (.*)$", text, re.DOTALL | re.MULTILINE)
        for line in (line for found in code for line in "".join(found).splitlines()):
            named = re.match(r"\s*(?:sudo )?(?:\.venv/bin/)?shardmill ((?:[a-z][a-z-]*(?: |$))+)([^#|&]*)", line)
            if not named:
                continue
            words, count = named[1].split(), count + 1
            command = next((name for n in (2, 1) if (name := " ".join(["shardmill", *words[:n]])) in known), "")
            group = any(name.startswith(f"shardmill {words[0]} ") for name in known)
            extra = {*re.findall(r"(?<!\S)(--[a-z-]+)", line)} - alone - {"--help"}
            if not (command or group) or (command and not extra <= known[command] | ALIASES):
                wrong.append(f"{page.relative_to(ROOT)}: {line}")
    assert count > 100 and wrong == []


def test_every_rule_has_its_row() -> None:
    """In docs/architecture.md, in the table of the steps; others make nothing of a model, or lend to others."""
    text = "\n".join(file.read_text() for file in [ROOT / "Snakefile", *(ROOT / "rules").glob("*.smk")])
    rules = set(re.findall(r"^ *(?:rule|checkpoint) (\w+):|^ *use rule \w+ as (\w+) with:", text, re.MULTILINE))
    table = (ROOT / "docs/architecture.md").read_text().partition("| step | makes | from |\n")[2].partition("\n\n")[0]
    shown = {name for row in table.splitlines()[1:] for name in row.strip("| ").split(" | ")[0].split(", ")}
    made = {one or other for one, other in rules}
    assert len(made) > 15 and made - {"all", "refused", "step", "engine_step", "aside"} <= shown
    assert {name for name in shown if not re.search(rf"\b{name}\b", text)} == set()


def test_the_drawing_of_the_rules_leaves_out_what_others_imply() -> None:
    """In whatever order Snakemake lists them. `tools/draw_dag.py --check`, which CI runs, compares the page's."""
    spec = importlib.util.spec_from_file_location("draw_dag", ROOT / "tools/draw_dag.py")
    assert spec is not None and spec.loader is not None
    draw_dag = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_dag)
    names = ["id0[report]", "id1[fetch]", "id2[convert]", "id3[split]"]
    arrows = ["id1 --> id3", "id3 --> id2", "id1 --> id2", "id2 --> id0", "id1 --> id0"]
    drawn = draw_dag.drawing("\n".join([*names, *arrows]))
    shown = ["    convert --> report", "    fetch --> split", "    split --> convert"]
    assert drawn == "\n".join(["```mermaid", "flowchart LR", *shown, "```\n"])
    assert drawn == draw_dag.drawing("\n".join([*reversed(names), *reversed(arrows)]))
    assert draw_dag.BLOCK.search((ROOT / "docs/architecture.md").read_text())


def test_every_thread_of_the_server_is_in_its_drawing() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## The server's threads\n")[2].partition("\n## ")[0]
    code = "".join(file.read_text() for file in (ROOT / "shardmill/serve").glob("*.py"))
    names = re.findall(r'Thread\(.*name="(\w+)"|ThreadPoolExecutor\(\d+, "(\w+)"', code)
    assert len(names) > 3 and code.count("Thread(") + code.count("ThreadPoolExecutor(") == len(names)
    assert {f"`{one or other}`" for one, other in names} <= {*re.findall(r"`\w+`", page)}


def test_every_address_of_the_server_has_its_row() -> None:
    text = (ROOT / "docs/serving.md").read_text().partition("## Addresses\n")[2].partition("\n## ")[0]
    assert {name.removesuffix("/NAME") for name in re.findall(r"`(?:GET|POST) (/[\w/.]*)`", text)} == set(ENDPOINTS)


def test_every_metric_has_its_row() -> None:
    metrics = Metrics()
    metrics.watch(PrefixCache(cast(Any, None), 0))
    metrics.describe("", "", dict)
    shown = re.findall(r"shardmill_\w+", (ROOT / "docs/serving.md").read_text())
    assert {name.removesuffix("_total").removesuffix("_info") for name in shown} == {
        family.name for family in metrics.registry.collect()
    }


def test_every_public_type_of_the_swift_package_has_its_row() -> None:
    """In docs/swift.md, beside its module; what a type can do is in its comments, which DocC makes pages of."""
    kinds = r"^public (?:final )?(?:class|struct|enum|actor|protocol|typealias) (\w+)"
    rows = {
        row[1]: row[0] for row in re.finditer(r"^\| `(\w+)` \|.*$", (ROOT / "docs/swift.md").read_text(), re.MULTILINE)
    }
    package = (ROOT / "Package.swift").read_text()
    modules = dict(re.findall(r'\.target\(\s*name: "(Shardmill\w*)",[^.]*?path: "(swift/Sources[^"]+)"', package))
    assert len(modules) == 5
    for module, folder in modules.items():
        for file in sorted((ROOT / folder).rglob("*.swift")):
            for name in re.findall(kinds, file.read_text(), re.MULTILINE):
                assert f"`{name}`" in rows[module], f"{name} of {module}"


def test_names_in_pages_exist() -> None:
    """Whatever stands between backticks: each of its words is one of our files' or commands', or an example's.

    Pages of lab/ may quote a commit that had other names.
    """
    words, known = set(), {one for command in options().values() for one in command}
    known |= {name for action in get_argument_parser()._actions for name in action.option_strings}
    for file in tracked():
        text = "" if file.suffix == ".md" or file.name.startswith("test_") else readable(file)
        words |= {*NAME.findall(text), *NAME.findall(file.relative_to(ROOT).as_posix())}
    lost = []
    for page in (
        page for page in PAGES if page.name not in {"CHANGELOG.md", "ane-rules.md"} and page.parent.name != "lab"
    ):
        for span in spans(page):
            named = NAME.findall(span) if " " not in span else re.findall(r"(?<!\S)--[a-z][\w-]*", span)
            lost += [
                f"{page.relative_to(ROOT)}: {name} in `{span}`"
                for name in named
                if not (name in words or name in known or name in OTHERS_NAMES or name in FOREIGN)
                and not EXAMPLES.fullmatch(name)
            ]
    assert lost == []
