"""The set-up: one set of versions everywhere, and README's commands are those that are run."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shardmill.machine import CODE
from shardmill.witness import installed

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
# A change of these changes the bytes of an artifact.
DECIDING = ("coremltools", "numpy", "protobuf", "safetensors", "tokenizers", "transformers")
SKIPS = "skipif(not installed." + "is_there()"
HASHED = (ROOT / "envs/shardmill.txt").read_text()


def pins(lines: Iterator[str]) -> dict[str, str]:
    """name -> version of `name==version` lines; anything else is an error."""
    found: dict[str, str] = {}
    for line in lines:
        name, version = line.split("==")
        assert canonicalize_name(name) not in found, f"{name} twice"
        found[canonicalize_name(name)] = version
    return found


CONSTRAINTS = pins(
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
)


def needs(extra: str) -> list[Requirement]:
    """Return the packages of an extra, and of the extras of this project that it names."""
    listed = EXTRAS[extra]
    return [r for r in listed if r.name != "shardmill"] + [
        r for one in listed if one.name == "shardmill" for name in one.extras for r in needs(name)
    ]


def closure(names: list[str], extras: dict[str, tuple[str, ...]]) -> set[str]:
    """Everything that the installed distributions need, whatever the platform and Python that ask for it."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        wanted = extras.get(name, ())
        for requirement in map(Requirement, requires(name)):
            if any(applies(requirement, extra) for extra in ("", *wanted)):
                waiting.append(canonicalize_name(requirement.name))
    return found


def requires(name: str) -> list[str]:
    """Return what a distribution needs, or nothing where it can't be installed: tools/resolve_extras.py looks there."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def applies(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement holds on some machine that is supported."""
    if requirement.marker is None:
        return True
    platforms = (
        {"sys_platform": "linux", "platform_system": "Linux"},
        {"sys_platform": "darwin", "platform_system": "Darwin"},
    )
    return any(
        requirement.marker.evaluate({"extra": extra, "python_version": version, **platform})
        for version in ("3.11", "3.12", "3.13")
        for platform in platforms
    )


def test_what_decides_an_artifacts_bytes_is_pinned() -> None:
    """torch is the exception: its range is the range that coremltools works with. All other packages have ranges."""
    specifiers = {canonicalize_name(r.name): str(r.specifier) for r in DEPENDENCIES}
    assert specifiers["torch"] == "<2.14,>=2.7"
    assert {name for name, specifier in specifiers.items() if specifier.startswith("==")} == set(DECIDING)


@pytest.mark.parametrize("name", ["snakemake", "uvicorn"])
def test_packages_whose_private_parts_are_used_have_one_minor_version(name: str) -> None:
    """The next one may have changed these parts, which no test here has seen."""
    (needed,) = (r for r in DEPENDENCIES if r.name == name)
    major, minor, *_ = map(int, CONSTRAINTS[name].split("."))
    assert f"{major}.{minor}.99" in needed.specifier
    assert f"{major}.{minor + 1}.0" not in needed.specifier and f"{major}.{minor - 1}.99" not in needed.specifier


def test_constraints_have_a_version_that_the_project_allows() -> None:
    """For every dependency, those of the extras too."""
    requirements = [*DEPENDENCIES, *(r for listed in EXTRAS.values() for r in listed if r.name != "shardmill")]
    assert [
        f"{r}, {CONSTRAINTS.get(canonicalize_name(r.name))}"
        for r in requirements
        if CONSTRAINTS.get(canonicalize_name(r.name), "0") not in r.specifier
    ] == []


def test_constraints_are_complete() -> None:
    """Nothing that gets installed is left to the day on which it is installed."""
    roots = [r.name for r in (*DEPENDENCIES, *needs("test"), *needs("coreai"))]
    # torch's build for NVIDIA pins its own libraries, and is not the one used here
    needed = {name for name in closure(roots, {}) if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert needed <= CONSTRAINTS.keys(), f"add to constraints.txt: {sorted(needed - CONSTRAINTS.keys())}"


def imported(folder: str) -> set[str]:
    """Top-level names of the third-party modules that Python files in a folder import, wherever the import stands."""
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    local = {*CODE, "shardmill_lab", "tests"} | {
        path.stem for tests in ("tests", "decoding/tests", "portable/tests") for path in (ROOT / tests).rglob("*")
    }
    return found - sys.stdlib_module_names - local


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("shardmill", ["audio", "coreai", "grammar", "sign"]),
        ("decoding/drafted_decoding", ["grammar"]),
        ("kit/kit_runner", []),
        ("lab/shardmill_lab", []),
        ("scripts", []),
        ("tests", ["test"]),
    ],
)
def test_what_is_imported_is_declared(folder: str, extras: list[str]) -> None:
    """No module is used that is only there because another package happens to need it today."""
    declared = {canonicalize_name(r.name) for r in [*DEPENDENCIES, *(r for extra in extras for r in needs(extra))]}
    # The runtime's modules are declared also where no wheel of it can be installed.
    runtime = {module: [name] for module, name in installed.PACKAGES.items()}
    providers = runtime | dict(metadata.packages_distributions())
    used = {module: {canonicalize_name(name) for name in providers[module]} for module in imported(folder)}
    assert [module for module, names in used.items() if not names & declared] == []


def test_this_environment_is_the_constrained_one() -> None:
    """The tests run with the versions that constraints.txt names, so a green run speaks for them."""
    here = {name: metadata.version(name).partition("+")[0] for name in closure([r.name for r in DEPENDENCIES], {})}
    different = {name: version for name, version in here.items() if CONSTRAINTS.get(name) not in (version, None)}
    assert not different, f"pip install -c constraints.txt -e '.[test]' would change: {different}"


def test_files_that_repeat_versions_have_those_of_the_constraints() -> None:
    """The environment of the rules and pre-commit's linters are written by a script, which finds nothing to write."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools/write_pins.py", "--check"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_file_with_hashes_agrees() -> None:
    """Whatever is needed is in it, in the constrained version, and each of its lines has hashes."""
    blocks = re.findall(r"^(\S+==\S+)( ; .*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", HASHED, re.MULTILINE)
    held = pins(line for line, _, _ in blocks)
    assert len(held) == sum("==" in line for line in HASHED.splitlines() if re.match(r"\w", line))
    marked = {canonicalize_name(line.partition("==")[0]) for line, marker, _ in blocks if marker}
    assert held.items() - CONSTRAINTS.items() == {(name, held[name]) for name in marked - CONSTRAINTS.keys()}
    needed = closure([r.name for r in DEPENDENCIES], {})
    assert needed & CONSTRAINTS.keys() <= held.keys()


def test_supported_pythons_are_said_once() -> None:
    """pyproject.toml, CI and `shardmill doctor` mean the same versions, and the tests run on one of them."""
    from shardmill.commands.doctor import PYTHONS

    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())
    versions = [tuple(map(int, v.split("."))) for v in ci["jobs"]["check"]["strategy"]["matrix"]["python"]]
    assert (versions[0], versions[-1]) == PYTHONS
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, PYTHONS[0]))},<3.{PYTHONS[1][1] + 1}"
    assert sys.version_info[:2] in versions


def commands() -> list[str]:
    """README's lines that install something."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if "pip install" in line]


def test_readme_s_commands_are_the_ones_that_are_run() -> None:
    """README builds with its first command, or the second for CPUs, and tests with the third, which CI runs."""
    build, cpu, test = commands()[:3]
    assert build.endswith("&& snakemake --cores 4 all")
    assert re.sub(r"--extra-index-url https://download\.pytorch\.org/whl/cpu ", "", cpu) == build != cpu
    assert test.endswith("&& pytest")
    for line in (build, test):
        words = shlex.split(line.split("pip install")[1].split("&&")[0])
        assert words[:2] == ["-c", "constraints.txt"]
        assert words[2] == "-e"
    pattern = re.search(r"grep -E '(.*)' README", (ROOT / ".ci/run").read_text())
    assert pattern is not None
    matching = [line for line in (ROOT / "README.md").read_text().splitlines() if re.search(pattern[1], line)]
    assert matching == [test]


def test_ci_runs_the_tests_that_need_apples_runtime() -> None:
    """README's command does without it, so that it can be installed everywhere; .ci/run adds it and runs its folder."""
    assert "coreai" not in {r.name.partition("-")[0] for r in needs("test")}
    lines = (ROOT / ".ci/run").read_text().splitlines()
    ran = lines.index("""if pip install -c constraints.txt -e '.[coreai]' > "$scratch/coreai.log" 2>&1; then""")
    assert lines[ran + 1] == '  pytest -rs -n 0 -m "not slow" tests/witness tests/test_upstream.py'
    skipping = {file for file in (ROOT / "tests").rglob("test_*.py") if SKIPS in file.read_text()}
    assert {file for file in skipping if file.parent.name != "witness"} == {ROOT / "tests/test_upstream.py"}


def test_ci_runs_what_a_developer_runs() -> None:
    """Both runners call .ci/run and nothing else decides; states need macOS 15."""
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]["check"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    systems = job["strategy"]["matrix"]["os"]
    assert any(name.startswith("ubuntu") for name in systems)
    assert all(int(name.removeprefix("macos-")) >= 15 for name in systems if name.startswith("macos"))
    assert any(name.startswith("macos") for name in systems)


def test_what_others_publish_is_named_by_its_digest() -> None:
    """Names of versions can move; Dependabot proposes newer digests."""
    used = re.findall(r"uses: (.*)", (ROOT / ".github/workflows/ci.yaml").read_text())
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", name) for name in used)
    images = re.findall(r"^FROM (\S+)", (ROOT / "Containerfile").read_text(), re.MULTILINE)
    assert images and all(re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", name) for name in images)
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert {one["package-ecosystem"] for one in updates} == {"github-actions", "docker", "pip"}
