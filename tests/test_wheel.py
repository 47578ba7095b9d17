"""The wheel: the same bytes whenever it is built, and all that the workflow needs in it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from patience import BUILDING, PATIENCE
from pipeline.project import PACKAGES, python_path
from processes import succeeded

ROOT = Path(__file__).parents[1]
# shardmill itself must come from the wheel, and whatever it needs from where the tests have it.
DIGESTS = """
import json, shardmill
from pathlib import Path
from shardmill.pipeline.code_digest import tools
from shardmill.pipeline.needs import STEPS
print(json.dumps([str(Path(shardmill.__file__).parent), {name: tools(step, "phi3") for name, step in STEPS.items()}]))
"""


def build(source: Path, kind: str, out: Path, **environment: str) -> Path:
    """A distribution of a folder's project."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    done = subprocess.run(
        command, cwd=source, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    succeeded(done)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel holds."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of this Python's, outside the clone, with the wheels' library."""
    environment = os.environ | {"PYTHONPATH": python_path(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILDING,
    )


# Distributions of this repository, none of which is registered anywhere.
CARRIED = {
    *("drafted_decoding/generate.py", "kit_runner/measure.py"),
    *("portable_coreml/run/execute.py", "shardmill_lab/rotate.py"),
}
OURS = {"shardmill", "drafted-decoding", "kit-runner", "portable-coreml", "portable-coreml-extra"}
SHARDMILL = ("-c", "from shardmill.cli import main; main()")


@pytest.fixture(scope="module")
def ready(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `shardmill init` makes."""
    parent = tmp_path_factory.mktemp("ready")
    done = run(site, parent, *SHARDMILL, "init", "mine")
    assert done.returncode == 0 and done.stdout.startswith("cd mine && snakemake --cores 4 all"), done
    return parent / "mine"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.thorough
def test_it_is_the_same_when_built_again_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """Of the source distribution, with another hash seed, time zone, locale and mask."""
    source = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    old = os.umask(0o077)
    try:
        other = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
        again = build(folder, "wheel", tmp_path / "again", **other)
    finally:
        os.umask(old)
    assert (again.name, digest(again)) == (wheel.name, digest(wheel))
    assert digest(build(ROOT, "sdist", tmp_path / "twice", **other)) == digest(source)


def test_it_holds_the_workflow_and_nothing_of_the_machine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert not [name for name in names if str(ROOT).encode() in archive.read(name)]
    for name in ("Snakefile", "rules/gates.smk", "scripts/step.py", "configs/schema.json", "envs/shardmill.yaml"):
        assert f"shardmill/workflow/{name}" in names
    assert "shardmill/workflow/resources/demo/config.json" in names
    for name in ("index.html", "page.js", "marked.esm.js", "purify.min.js"):
        assert f"shardmill/serve/page/{name}" in names
    assert not [name for name in names if "__pycache__" in name or ".DS_Store" in name or "/build/" in name]


def test_it_names_the_others_whose_work_it_carries(wheel: Path) -> None:
    """NOTICE names every checkpoint in it, and nothing that is not in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        notices = [name for name in names if name.endswith(".dist-info/licenses/NOTICE")]
        assert len(notices) == 1
        text = archive.read(notices[0]).decode()
    assert text == (ROOT / "NOTICE").read_text()
    named = re.findall(r"^resources/([\w-]+)", text, re.MULTILINE)
    carried = {name.split("/")[3] for name in names if re.fullmatch(r".*/resources/[^/]+/config\.json", name)}
    assert sorted(named) == sorted(carried)


def test_it_asks_an_index_for_no_name_of_ours(wheel: Path) -> None:
    """Nobody has registered them: whoever did would run code in every installation."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = re.findall(r"^Requires-Dist: *([\w.-]+)", archive.read(name).decode(), re.MULTILINE)
        assert set(archive.namelist()) >= CARRIED
    assert "coremltools" in required and OURS & {re.sub(r"[-_.]+", "-", name) for name in required} == set()


@pytest.mark.thorough
def test_pip_refuses_a_wheel_of_another_hash(tmp_path: Path, wheel: Path) -> None:
    def install(sha256: str) -> subprocess.CompletedProcess[str]:
        address = f"shardmill @ {wheel.as_uri()}#sha256={sha256}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--target",
            str(tmp_path),
            address,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    other = install("0" * 64)
    assert other.returncode and "DO NOT MATCH THE HASHES" in other.stderr and not any(tmp_path.iterdir())
    assert install(digest(wheel)).returncode == 0 and (tmp_path / "portable_coreml/run/execute.py").is_file()


def test_no_script_or_page_installs_a_name_of_ours_from_an_index() -> None:
    told = ("*.md", "*.sh", "*.yaml", "*.txt", "Containerfile", ".ci/*", "hatch_build.py", "*.toml")
    listed = subprocess.run(["git", "ls-files", *told], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    names = "|".join(sorted(OURS, key=len, reverse=True))
    by_name = re.compile(rf"pip install (?!.*--no-index)[^|#&\n]*?(?<![\w./-])({names})(==[\d.]+)?(\s|$)")
    lines = ((name, line) for name in listed.stdout.split() for line in (ROOT / name).read_text().splitlines())
    assert [f"{name}: {line}" for name, line in lines if by_name.search(line.replace("`", " "))] == []


@pytest.mark.thorough
def test_the_library_in_it_has_the_clone_s_keys(site: Path, tmp_path: Path) -> None:
    """Else a build of the wheel would find nothing in a store, and a rebuilder would be refused."""
    of_wheel = run(site, tmp_path, "-c", DIGESTS).stdout
    of_clone = run(Path(os.pathsep.join(map(str, (ROOT, *PACKAGES)))), tmp_path, "-c", DIGESTS).stdout
    assert str(site) in of_wheel and str(ROOT) in of_clone
    assert of_wheel.split(", ", 1)[1] == of_clone.split(", ", 1)[1]


@pytest.mark.slow
def test_a_folder_that_init_made_is_ready(site: Path, ready: Path) -> None:
    done = run(site, ready, "-m", "snakemake", "--cores", "1", "build/demo/parts/head_0.json")
    succeeded(done)
    assert (ready / "build/demo/parts/head_0.json").is_file()
    done = run(site, ready, "-m", "snakemake", "--cores", "1", "all", "--dry-run")
    assert done.returncode == 0 and "build/demo/report.html" in done.stdout, done.stderr
    assert (ready / "config/README.md").is_file()


def test_init_writes_over_nothing(site: Path, ready: Path) -> None:
    done = run(site, ready.parent, *SHARDMILL, "init", "mine")
    assert (done.returncode, done.stderr) == (
        1,
        "shardmill: mine/Snakefile: is there already; choose another folder, or remove it\n",
    )


MODULE = """
configfile: "config/config.yaml"

module shardmill:
    snakefile: "{snakefile}"
    config: config

use rule * from shardmill
"""


@pytest.mark.thorough
def test_the_lab_s_commands_work_from_it(site: Path, tmp_path: Path) -> None:
    """Their code is in no folder of shardmill's, and nothing else would show that the wheel lacks it."""
    snakefile = site / "shardmill/workflow"
    like = str(snakefile / "configs/demo.yaml")
    for words in (("synth-checkpoint", "made", "--like", like, "--layers", "1"), ("rotate", "made", "turned")):
        succeeded(run(site, tmp_path, *SHARDMILL, *words))
    assert (tmp_path / "made/config.json").is_file() and (tmp_path / "turned/config.json").is_file()
    (tmp_path / "plan.json").write_text('{"buckets": [], "model": "m"}')
    (tmp_path / "source").symlink_to("made")
    (tmp_path / "text.txt").write_text("A short text.")
    done = run(site, tmp_path, *SHARDMILL, "draft", "train", ".", "--text", "text.txt")
    assert done.returncode == 1 and "text.txt: gives 0 texts of up to 256 tokens" in done.stderr, done


@pytest.mark.slow
def test_another_workflow_uses_it_as_a_module(site: Path, tmp_path: Path) -> None:
    """From a folder that holds a config and nothing else; so does what snakedeploy writes."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text((ROOT / "configs/demo.yaml").read_text())
    asked = "from shardmill.pipeline.resolve import workflow_root; print(workflow_root())"
    root = run(site, tmp_path, "-c", asked).stdout.strip()
    assert root == str(site / "shardmill/workflow")
    (tmp_path / "Snakefile").write_text(MODULE.format(snakefile=f"{root}/Snakefile"))
    done = run(site, tmp_path, "-m", "snakemake", "--cores", "1", "build/demo/parts/head_0.json")
    succeeded(done)
    assert (tmp_path / "build/demo/parts/head_0.json").is_file()
    done = run(site, tmp_path, "-m", "snakemake", "--cores", "1", "--dry-run")
    assert done.returncode == 0 and "build/demo/report.html" in done.stdout, done.stderr


@pytest.mark.thorough
def test_without_a_config_the_demo_is_built_from_anywhere(site: Path, tmp_path: Path) -> None:
    snakefile = str(site / "shardmill/workflow/Snakefile")
    done = run(site, tmp_path, "-m", "snakemake", "-s", snakefile, "--cores", "1", "all", "--dry-run")
    assert done.returncode == 0 and "build/demo/report.html" in done.stdout, done.stderr
