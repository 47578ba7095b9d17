"""A step as a job: what it is given, what a person reads, and where the rest goes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from processes import succeeded

from shardmill.errors import GateError
from shardmill.machine import THREAD_VARIABLES as THREADS
from shardmill.pipeline import job
from shardmill.pipeline.job import as_paths, error_line
from shardmill.runtime.bundles import report_load

SCRIPT = """
import json, logging, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from shardmill.errors import GateError
from shardmill.pipeline.job import execute
from shardmill.pipeline.needs import STEPS
from shardmill.pipeline.task import Task

def step(part, packages, settings{more}):
    def work(made):
        logging.getLogger("shardmill.pipeline.task").info("half way")
        print("chatter of a library")
        Path("given.json").write_text(json.dumps([str(part), [str(p) for p in packages], settings, str(made["page"])]))
        assert isinstance(part, Path) and all(isinstance(p, Path) for p in packages)
        {body}

    return Task(work)

class Wildcards(list):
    model = "tiny"

job = SimpleNamespace(
    input={{"part": "a.json", "packages": ["b", "c"]}},
    output={{"page": "d.html"}},
    rule="convert", params={{"tools": {{"code": "c", "packages": {{}}}}, "settings": "e"}},
    log=["logs/step.log"], wildcards=Wildcards(["head_0"]),
    threads={threads}, resources={{"mem_mb": 800}},
)
sys.modules[STEPS["convert"].module] = SimpleNamespace(task=step)
execute(job)
"""


def run(folder: Path, body: str, more: str = "", threads: int = 3) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(body=body, more=more, threads=threads)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_step_gets_paths_and_parameters_and_says_what_it_does(tmp_path: Path) -> None:
    done = run(tmp_path, "pass")
    succeeded(done)
    assert json.loads((tmp_path / "given.json").read_text()) == ["a.json", ["b", "c"], "e", "d.html"]
    assert (done.stdout, done.stderr) == ("", "shardmill convert head_0: half way\n")
    assert "chatter of a library" in (tmp_path / "logs/step.log").read_text()


def test_a_job_that_is_to_be_silent_writes_into_its_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where the main process takes it: how far it is, and why it failed."""
    monkeypatch.setenv(job.SILENT, "1")
    done = run(tmp_path, 'raise GateError("kl is 1")')
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    log = (tmp_path / "logs/step.log").read_text()
    assert "\nINFO half way\n" in f"\n{log}" and "\nERROR kl is 1\n" in log
    assert re.search(r"^DEBUG \d+\.\d\d s of CPU$", log, re.MULTILINE)


def test_a_load_by_core_ml_names_the_part_and_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable engine loads in no time, and nothing is said."""
    (tmp_path / "compiled/head_0.mlmodelc/inner").mkdir(parents=True)
    (tmp_path / "compiled/head_0.mlmodelc/inner/weights").write_bytes(bytes(2_000_000))
    lines: list[str] = []
    monkeypatch.setattr(job.log, "info", lambda form, *given: lines.append(form % given))
    for portable in (True, False):
        monkeypatch.setattr(job, "is_portable", partial(bool, portable))
        with job._saying_loads(tmp_path):
            report_load("head_0")
        assert bool(lines) != portable
    assert lines == ["Core ML loads head_0, 2.0 MB; a first load takes minutes for a gigabyte"]


def test_a_failure_is_one_line_and_the_log_has_the_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, 'raise GateError("parity head_0: kl is 1, must be <= 0.02")')
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == ["shardmill convert head_0: parity head_0: kl is 1, must be <= 0.02"]
    log = (tmp_path / "logs/step.log").read_text()
    assert "Traceback" in log
    assert "GateError" in log


def test_what_changed_code_made_is_not_kept(tmp_path: Path) -> None:
    """The key names the code that Snakemake found; under it there must be no result of another."""
    script = SCRIPT.replace("return Task(work)", 'return Task(work, Action("convert"))')
    script = script.replace('{{"page": "d.html"}}', '{{"page": "d.html", "receipt": "d.receipt.json"}}')
    script = script.replace("import Task", "import Action, Task")
    script = script.format(body='made["page"].write_text("p")', more="", threads=3)
    (tmp_path / "build/tiny/source").mkdir(parents=True)
    (tmp_path / "build/tiny/source/config.json").write_text('{"model_type": "phi3"}')
    (tmp_path / "build/tiny/model.json").write_text("{}")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("code was changed while it worked; run the same command again")
    assert not (tmp_path / "d.html").exists() and not (tmp_path / "build/tiny/model.json").exists()


def test_libraries_are_told_how_many_threads_the_job_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's shell says: with other threads a gate's figures would have other last digits."""
    for name in THREADS:
        monkeypatch.setenv(name, "7")
    body = f"import os; assert [os.environ[name] for name in {THREADS}] == ['3'] * 3"
    succeeded(run(tmp_path, body))


def test_a_job_imports_of_coremltools_what_it_needs(tmp_path: Path) -> None:
    """It is most of what a small job does."""
    succeeded(run(tmp_path, "import coremltools; assert 'transformers' not in sys.modules"))


def test_a_job_that_finds_its_work_done_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    """A build has dozens of jobs, and most of what such a one does is to start."""
    slow = (
        "torch",
        "transformers",
        "coremltools",
        "numpy",
        "scipy",
        "pydantic",
        "packaging",
        "jinja2",
        "fsspec",
        "yaml",
    )
    body = f"import sys; found = [name for name in {slow} if name in sys.modules]; assert not found, found"
    succeeded(run(tmp_path, body))


def test_torch_obeys_however_many_cores_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, which every machine has: of more than there are cores, MKL would give fewer."""
    for name in THREADS:
        monkeypatch.setenv(name, "7")
    succeeded(run(tmp_path, "import torch; assert torch.get_num_threads() == 1", threads=1))


def test_a_step_that_starts_threads_is_told_how_many(tmp_path: Path) -> None:
    succeeded(run(tmp_path, "assert threads == 3", more=", threads"))


INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
AFTERWARDS = {
    "at work": "",
    "swallowed by a library, which fails later": "raise RuntimeError('only a single TORCH_LIBRARY')",
    "swallowed by a library, and all done": "return",
}


@pytest.mark.parametrize("moment", AFTERWARDS)
def test_ctrl_c_ends_the_job_with_one_line(tmp_path: Path, moment: str) -> None:
    after = AFTERWARDS[moment]
    body = (
        f"""{INTERRUPT}"""
        if not after
        else f"""
        try:
            {INTERRUPT}
        except:
            {after}"""
    )
    done = run(tmp_path, body)
    assert done.returncode == 130
    assert done.stderr.splitlines()[1:] == ["shardmill convert head_0: interrupted"]


@pytest.mark.thorough(but=["True"])
@pytest.mark.parametrize("swallowed", [False, True])
def test_sigterm_ends_the_job_and_leaves_nothing_half_made(tmp_path: Path, swallowed: bool) -> None:
    """A scheduler that takes a node away sends it to whatever runs there; a step works in a folder of the store."""
    body = f"""
        import os, signal, time
        from shardmill.files import replacing
        from shardmill.pipeline.cache.store import Store
        def half(made):
            with replacing(made["page"]) as temporary:
                temporary.write_text("half")
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                finally:
                    time.sleep({60 * swallowed})
        Store(Path("build/.store")).make(Path("build/.store/entry"), {{"page": Path("d.html")}}, half)
    """
    done = run(tmp_path, body)
    assert done.returncode == 143
    assert done.stderr.splitlines()[1:] == ["shardmill convert head_0: interrupted"]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(("tmp-", ".making-"))]
    assert not (tmp_path / "d.html").exists()


HUGE = "b'x' * 900_000_000"
IN_A_CHILD = f"import subprocess; subprocess.run([sys.executable, '-c', {HUGE!r}], check=True)"
SMALL_CHILD = "import subprocess; subprocess.run(['true'], check=True)"
AS_A_CHILD_OF_A_SHELL = ["sh", "-c", '"$@"; exit $?', "sh"]  # else Linux counts from what pytest has resident


def logged_peak(folder: Path, body: str) -> int:
    command = [*AS_A_CHILD_OF_A_SHELL, sys.executable, "-c", SCRIPT.format(body=body, more="", threads=3)]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    found = re.search(r"peak memory (\d+) MB, declared 800 MB", (folder / "logs/step.log").read_text())
    assert found
    return int(found[1])


@pytest.mark.thorough(but=["; raise ValueError"])
@pytest.mark.parametrize("ending", ["", "; raise ValueError"])
def test_the_log_says_what_memory_it_took_whether_it_fails_or_not(ending: str, tmp_path: Path) -> None:
    """Its own and that of a larger process it started; a smaller one is as good as nothing."""
    nothing = logged_peak(tmp_path, "pass" + ending)
    assert 900 <= logged_peak(tmp_path, HUGE + ending) < 900 + 2 * nothing
    assert 900 + nothing <= logged_peak(tmp_path, IN_A_CHILD + ending) < 900 + 4 * nothing
    assert logged_peak(tmp_path, SMALL_CHILD + ending) < nothing + 10


def test_errors_become_one_line() -> None:
    log = Path("logs/a.log")
    assert error_line(GateError("the number"), log) == "the number"
    full = OSError(errno.ENOSPC, "No space left on device", "build/x")
    assert error_line(full, log) == "build/x: the disk is full; free some space and run the same command again"
    assert error_line(shutil.Error([("a", "build/b", str(full))]), log).startswith("build/b: the disk is full")
    closed = PermissionError(errno.EACCES, "Permission denied", "build/.store/x")
    assert error_line(closed, log) == "build/.store/x: Permission denied; allow it and run the same command again"
    assert error_line(GateError("a library\n said"), log) == "a library said"
    assert error_line(ValueError("first\nsecond"), log) == "unexpected ValueError: first (traceback in logs/a.log)"
    assert error_line(KeyError(), log) == "unexpected KeyError: KeyError (traceback in logs/a.log)"


@pytest.mark.parametrize(("value", "expected"), [("a", Path("a")), (["a", "b"], [Path("a"), Path("b")]), ([], [])])
def test_names_become_paths(value: str | list[str], expected: object) -> None:
    assert as_paths(value) == expected


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no more than ru_maxrss")
def test_a_peak_is_the_jobs_own() -> None:
    """Not that of the process that started it, which Linux goes on counting."""
    ballast = bytearray(os.urandom(1 << 20)) * 400
    said = "from shardmill.pipeline.job import peak_mb; print(peak_mb())"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert 5 < float(done.stdout) < len(ballast) / 1e6 - 100
