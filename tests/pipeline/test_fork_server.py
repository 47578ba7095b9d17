"""Jobs as forks of one process: each is what a process of its own would be, however it or what it belongs to ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from patience import PATIENCE, wait_until

from shardmill import machine
from shardmill.machine import THREAD_VARIABLES
from shardmill.pipeline import fork_server, made
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import perform
from shardmill.pipeline.needs import STEPS
from shardmill.pipeline.task import Action, Task

SERVER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from shardmill import interrupt
from shardmill.pipeline import fork_server

def do(job):
    exec(job.body, globals() | {{"job": job}})

fork_server.LIBRARIES = {libraries}
fork_server._execute = do
{more}
fork_server.main()
"""
JOB = """
import sys
from types import SimpleNamespace
from shardmill.pipeline import fork_server

fork_server._execute = lambda job: print("by itself", flush=True)
fork_server.run(SimpleNamespace(rule={rule!r}, threads={threads}, body={body!r}))
"""
SLEEPING = 'interrupt.ends_this_process("by force"); Path("pid").write_text(str(os.getpid())); time.sleep(3600)'
CAUGHT = """
interrupt.ends_this_process("by force")
try:
    Path("pid").write_text(str(os.getpid()))
    time.sleep(3600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(interrupt.exit_code())
"""


class Server:
    """The server, in a folder and in a group of processes of its own, as Snakemake and its jobs are."""

    def __init__(self, folder: Path, more: str = "", libraries: tuple[str, ...] = ("json",)) -> None:
        self.folder, self.own = folder, Path(tempfile.mkdtemp())  # a socket's path is short; pytest's are not
        socket = self.own / "socket"
        self.environment = os.environ | {
            fork_server.SOCKET: str(socket),
            fork_server.RULES: "split convert",
            "MARK": "the server's",
        }
        self.environment |= dict.fromkeys(THREAD_VARIABLES, "1")
        script = SERVER.format(libraries=libraries, more=more)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, cwd=folder, env=self.environment, process_group=0
        )
        self.wake()
        wait_until(lambda: self.process.poll() is not None or socket.exists())

    def wake(self) -> None:
        with mock.patch.dict(os.environ, self.environment):
            fork_server.wake()

    def job(self, body: str, rule: str = "convert", threads: int = 1, **more: Any) -> subprocess.Popen[str]:
        """A job in the server's group of processes, while there is one."""
        group = self.process.pid if self.process.poll() is None else 0
        command = [sys.executable, "-c", JOB.format(rule=rule, threads=threads, body=body), "an argument"]
        own = {"cwd": self.folder, "env": self.environment | {"MARK": "the job's"}} | more
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, process_group=group, **streams, **own)

    def fork(self) -> psutil.Process:
        """The fork of a job that wrote its number."""
        wait_until(lambda: (self.folder / "pid").exists() and (self.folder / "pid").read_text())
        return psutil.Process(int((self.folder / "pid").read_text()))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        assert not self.own.exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.end()


def outcome(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = job.communicate(timeout=PATIENCE)
    return job.returncode, out, err


def test_a_fork_has_what_its_job_has_and_nothing_of_the_server(server: Server, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    body = """
print(json.dumps([os.getcwd(), os.environ["MARK"], sys.argv[1:], sys.stdin.read(), job.rule]), flush=True)
print("an error", file=sys.stderr, flush=True)
print([signal.getsignal(one) for one in (2, 15, 17)] == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL])
others = [Path(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if int(one) > 2]
print([os.readlink(one).partition(":")[0] for one in others if os.path.lexists(one)])
"""
    code, out, err = outcome(server.job(body, cwd=elsewhere))
    first, signals, files = out.splitlines()
    assert (code, err) == (0, "an error\n")
    assert json.loads(first) == [str(elsewhere), "the job's", ["an argument"], "", "convert"]
    assert signals == "True"
    assert files == "['socket']"  # the way to its job


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('what was wrong')", 1),
        ("os._exit(5)", 137),  # it could say nothing more
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_a_job_ends_as_its_fork_does(server: Server, body: str, code: int) -> None:
    found, out, err = outcome(server.job(body))
    assert (found, out) == (code, "")
    assert err.endswith("ValueError: what was wrong\n") if "ValueError" in body else err == ""


def test_a_job_ends_after_all_that_its_fork_does_at_its_end(server: Server, tmp_path: Path) -> None:
    body = "import atexit; atexit.register(lambda: (time.sleep(0.2), Path('last').touch()))"
    assert outcome(server.job(body))[0] == 0
    assert (tmp_path / "last").exists()


def test_a_fork_whose_job_is_done_is_not_interrupted(server: Server) -> None:
    jobs = [server.job('interrupt.ends_this_process("by force")') for _ in range(4)]
    assert [outcome(job) for job in jobs] == [(0, "", "")] * 4


def test_ctrl_c_reaches_each_fork_once_and_the_server_not(server: Server) -> None:
    """A terminal sends it to the whole group of processes."""
    job = server.job(CAUGHT)
    server.fork()
    os.killpg(server.process.pid, signal.SIGINT)
    assert outcome(job) == (130, "interrupted\n", "")
    assert outcome(server.job("print('one more')")) == (0, "one more\n", "")


@pytest.mark.parametrize("group", [False, True])
def test_sigterm_reaches_a_fork_once_whoever_got_it(server: Server, group: bool) -> None:
    job = server.job(CAUGHT)
    server.fork()
    os.killpg(server.process.pid, signal.SIGTERM) if group else job.terminate()
    code, out, _ = outcome(job)
    assert code == 143
    assert out == "interrupted\n" or group  # the second of two signals may come first, and end it by force


def test_a_fork_ends_with_its_job(server: Server) -> None:
    job = server.job(SLEEPING)
    fork = server.fork()
    job.kill()
    job.wait()
    fork.wait(PATIENCE)


def test_a_fork_outlives_the_server_and_snakemake(tmp_path: Path) -> None:
    """As a job does, which then says that it goes on."""
    server = Server(tmp_path)
    job = server.job("Path('pid').write_text(str(os.getpid())); sys.exit(0 if Path('go').open().read() else 1)")
    os.mkfifo(tmp_path / "go")
    server.fork()
    server.end()
    (tmp_path / "go").write_text("go")
    assert outcome(job)[0] == 0


@pytest.mark.parametrize(
    ("more", "rule", "threads", "ended"),
    [
        ("", "compile", 1, False),  # a step that is spared torch
        ("", "convert", 2, False),  # libraries have read that there is one
        ("threading.Thread(target=time.sleep, args=[3600], daemon=True).start()", "convert", 1, False),
        ("", "convert", 1, True),
    ],
)
def test_without_a_fork_a_job_does_its_work_itself(
    tmp_path: Path, more: str, rule: str, threads: int, ended: bool
) -> None:
    server = Server(tmp_path, more)
    if ended:
        server.end()
    assert outcome(server.job("print('by a fork')", rule, threads)) == (0, "by itself\n", "")
    server.end()


@pytest.mark.parametrize(
    ("library", "says"),
    [
        ("import os, signal; os.killpg(0, signal.SIGINT)", "by a fork\n"),  # Ctrl-C, which is for jobs
        ("raise ImportError", "by itself\n"),
    ],
)
def test_an_import_that_is_disturbed_leaves_nothing_behind(tmp_path: Path, library: str, says: str) -> None:
    (tmp_path / "disturbed.py").write_text(library)
    server = Server(tmp_path, libraries=("disturbed",))
    assert outcome(server.job("print('by a fork')")) == (0, says, "")
    server.end()  # which looks for the folder of its socket


def test_nothing_is_imported_before_a_job_has_work_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose results are in the store needs no library."""
    monkeypatch.setattr(Server, "wake", lambda self: None)
    monkeypatch.setattr(sys.modules[__name__], "wait_until", lambda condition: None)
    server = Server(tmp_path, libraries=("no library of this name",))
    assert outcome(server.job("print('by a fork')")) == (0, "by itself\n", "")
    server.end()
    assert server.process.returncode == 0


def test_a_job_wakes_the_server_if_it_has_work_to_do(tmp_path: Path) -> None:
    woken: list[bool] = []
    store = Store(tmp_path / "store", lambda: None)

    def write(made: Mapping[str, Path]) -> None:
        made["page"].write_text("text")

    def wake() -> None:
        woken.append(True)

    task = Task(write, Action("convert"))
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert perform(task, {"page": folder / "page"}, folder / "page.receipt.json", store, None, wake) == (
            number == 1
        )
        assert len(woken) == 1


def test_what_takes_long_is_there_before_a_job_begins(tmp_path: Path) -> None:
    """The real libraries: with one thread, as one process can be forked, and without what they are spared."""
    server = Server(tmp_path, libraries=fork_server.LIBRARIES)
    body = """
names = {"torch.nn", "coremltools.converters.mil", "transformers.modeling_utils", "accelerate.utils", "scipy.optimize"}
print(json.dumps(sorted(names & {*sys.modules})))
"""
    code, out, err = outcome(server.job(body))
    assert (code, json.loads(out)) == (0, ["coremltools.converters.mil", "torch.nn", "transformers.modeling_utils"]), (
        err
    )
    server.end()


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, True),
        ({"jobs": fork_server.FEWEST - 1}, False),
        ({"dryrun": True}, False),
        ({"touch": True}, False),
        ({"local_exec": False}, False),  # a cluster
        ({"portable": False}, False),  # a Mac
    ],
)
def test_a_server_is_started_where_it_is_of_use(
    changes: dict[str, Any], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "jobs": fork_server.FEWEST,
        "dryrun": False,
        "touch": False,
        "local_exec": True,
        "portable": True,
    } | changes
    rule = SimpleNamespace(name="convert")
    dag = SimpleNamespace(needrun_jobs=lambda: [SimpleNamespace(rule=rule)] * asked["jobs"])
    workflow = SimpleNamespace(dag=dag, **{name: asked[name] for name in ("dryrun", "touch", "local_exec")})
    started: list[Any] = []
    monkeypatch.setattr(made, "of_steps", lambda workflow: [rule])
    monkeypatch.setattr(machine, "is_portable", lambda: asked["portable"])
    monkeypatch.setattr(fork_server.atexit, "register", lambda work, *arguments, **named: started.append(work))
    for variable in (fork_server.SOCKET, fork_server.RULES):
        monkeypatch.delenv(variable, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *arguments, **named: SimpleNamespace(stdin=sys.stdin))
        fork_server.start(workflow)
    assert (bool(started), os.environ.get(fork_server.RULES)) == (starts, "convert" if starts else None)
    for variable in (fork_server.SOCKET, fork_server.RULES):
        monkeypatch.delenv(variable, raising=False)


def test_a_step_whose_jobs_may_be_forks_uses_what_the_server_has_imported() -> None:
    for step in STEPS.values():
        assert not step.forks or {"coremltools", "transformers"} & {*step.packages}, step.name
        assert not step.forks or step.needs.torch, step.name
