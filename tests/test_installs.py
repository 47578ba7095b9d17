"""What can be installed where: the judgements of tools/resolve_extras.py, and which PyTorch README installs."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import pytest
import yaml

ROOT = Path(__file__).parent.parent
# As uv says it; the markers in the middle are left out.
NO_WHEEL = """error: No solution found when resolving dependencies
  cause: Because coreai-core{...}==1.0.0b3 has no wheels with a matching platform tag (e.g., `macosx_15_0_arm64`) and
shardmill depends on coreai-core{...}==1.0.0b3, we can conclude that your requirements are unsatisfiable."""
NO_VERSION = "error: Because there is no version of coreai-core==1.0.0b3, we can conclude that ..."


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return tools/resolve_extras.py as a module."""
    spec = importlib.util.spec_from_file_location("resolve_extras", ROOT / "tools/resolve_extras.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def test_every_python_and_system_that_the_pages_name_is_resolved(tool: ModuleType) -> None:
    """pyproject.toml and CI name the Pythons, README the oldest systems, docs/witness.md those of Apple's runtime."""
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]["check"]["strategy"]["matrix"]
    assert job["python"] == tool.PYTHONS
    readme = " ".join((ROOT / "README.md").read_text().split())
    oldest = re.search(r"Macs with Apple silicon \(macOS (\d+) or newer\) .* glibc (2\.\d+) or newer\)", readme)
    assert oldest is not None
    assert {f"macOS {oldest[1]}", f"Linux with glibc {oldest[2]}"} <= tool.SYSTEMS.keys()
    assert [tool.SYSTEMS[f"macOS {n}"][1] for n in (15, 26)] == ["15.0", "26.0"]
    first = re.search(r"glibc (2\.\d+) or newer, and for macOS (\d+)", (ROOT / "docs/witness.md").read_text())
    assert first is not None
    numbers = {name: tuple(map(int, name.split()[-1].split("."))) for name in tool.SYSTEMS}
    needed = {"L": tuple(map(int, first[1].split("."))), "m": (int(first[2]),)}
    assert {("coreai", name) for name in tool.SYSTEMS if numbers[name] < needed[name[0]]} == tool.REFUSED
    assert "\npython tools/resolve_extras.py\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize(
    ("extra", "system", "packages", "reason", "fault"),
    [
        ("sign", "macOS 15", {"torch": "2.13.0"}, "", ""),
        ("sign", "macOS 15", {}, NO_VERSION, "sign is refused: error: Because there is no version"),
        ("coreai", "macOS 15", {}, NO_WHEEL, ""),
        ("coreai", "macOS 15", {}, NO_VERSION, "coreai is refused for another reason: error: Because there is no"),
        ("coreai", "macOS 15", {"torch": "2.13.0"}, "", "coreai can be installed, and docs/witness.md says"),
        ("coreai", "macOS 26", {}, NO_WHEEL, "coreai is refused: error: No solution found"),
    ],
)
def test_an_extra_is_installed_or_refused_as_the_pages_say(
    tool: ModuleType, extra: str, system: str, packages: dict[str, str], reason: str, fault: str
) -> None:
    found = tool.judged(extra, system, tool.Answer(packages, reason))
    assert len(found) == bool(fault) and "".join(found).startswith(fault)


def test_a_package_that_ends_before_a_python_is_named(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv installs it on any Python after its first, and pip refuses to."""
    for name, version, needs in (
        ("old_one", "1.2+cpu", "<3.13,>=3.11"),
        ("any_one", "3", ">=3.9"),
        ("other", "4", "<3"),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\nRequires-Python: {needs}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    required = tool.installed({"old-one": "1.2", "any-one": "3", "other": "5"})  # which is here in another version
    assert required == {"old-one": "<3.13,>=3.11", "any-one": ">=3.9"}
    assert [tool.forbidden(required, python) for python in ("3.11", "3.12")] == [[], []]
    assert tool.forbidden(required, "3.13") == ["old-one needs Python <3.13,>=3.11"]


def test_a_package_without_a_version_in_the_constraints_is_named(tool: ModuleType) -> None:
    """But for CUDA's, which the wheels of PyTorch pin."""
    assert tool.unpinned({"torch": "2.13.0", "nvidia-cublas": "13", "triton": "3"}) == []
    assert tool.unpinned({"torch": "2.13.0", "new-one": "1"}) == ["new-one is not in constraints.txt"]


def test_uv_asks_the_index_that_pip_asks(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    file.write_text("[global]\nindex-url = https://example.org/simple\n")
    assert tool.own_index() == {"UV_DEFAULT_INDEX": "https://example.org/simple"}
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/other")
    assert tool.own_index() == {"UV_DEFAULT_INDEX": "https://example.org/other"}
    monkeypatch.setenv("UV_INDEX_URL", "https://example.org/uv")
    assert tool.own_index() == {}


def index(folder: Path, version: str) -> str:
    """Make an index that has one package, a torch of this version without any content. Return its address."""
    info, page = f"torch-{version}.dist-info", folder / "torch"
    page.mkdir(parents=True)
    wheel = page / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (page / "index.html").write_text(f'<a href="{quote(wheel.name)}">{wheel.name}</a>')
    return folder.as_uri()


def test_readme_s_command_for_cpus_takes_their_pytorch_and_the_next_one_keeps_it(tmp_path: Path) -> None:
    """Indexes on this disk stand for PyPI and PyTorch's; pip, the constraints and the options are the real ones."""
    lines = re.findall(r"^.*pip install (.*?) -e \S+ && .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    first, cpu, test = (shlex.split(line) for line in lines[:3])
    assert cpu[2:] == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    pin = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    pypi = index(tmp_path / "pypi", pin[1])
    cpu[3] = index(tmp_path / "pytorch", f"{pin[1]}+cpu")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": pypi}  # this machine's indexes are left out

    def installed(name: str, *commands: list[str]) -> str:
        """Return the version that commands leave in a fresh environment."""
        venv.create(tmp_path / name, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / name / "bin/python"), "install", "--quiet"]
        for words in commands:
            subprocess.run([*pip, *words, "torch"], cwd=ROOT, env=environment, check=True)
        (found,) = (tmp_path / name).rglob("torch-*.dist-info")
        return found.name.removeprefix("torch-").removesuffix(".dist-info")

    assert installed("plain", first) == pin[1]
    assert installed("cpu", cpu, test) == f"{pin[1]}+cpu"
