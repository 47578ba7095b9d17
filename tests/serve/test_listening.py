"""Where a server listens: a file, what systemd passes on, and what is told before anything large is imported."""

from __future__ import annotations

import http.client
import json
import os
import plistlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import tiny
from bench.folder import build_folder
from patience import PATIENCE, wait_until
from programs import skip_or_fail

from shardmill.errors import ShardmillError
from shardmill.serve.listening import listening

from .running import ask

TESTS = Path(__file__).parent.parent
SERVICE = TESTS.parent / "docs" / "service"
FAKE = [sys.executable, "-m", "serve.process", "0", "-1"]
FORGED = {"Host": "evil.example", "Content-Type": "application/json"}
LARGE = ("uvicorn", "fastapi", "torch", "transformers")  # the error itself takes numpy and pydantic


@contextmanager
def started(*command: str, files: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process of a server, which keeps these files."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    server: subprocess.Popen[str] = subprocess.Popen(
        command,
        cwd=TESTS,
        env=environment,
        text=True,
        pass_fds=files,
        **pipes,  # type: ignore[call-overload]
    )
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def asked(address: str | int, **more: str) -> tuple[int, str]:
    """Status and text of a completion, asked for at a file or a port under a name that no server has."""
    kind, where = (socket.AF_UNIX, address) if isinstance(address, str) else (socket.AF_INET, ("127.0.0.1", address))
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(kind, socket.SOCK_STREAM)
    connection.sock.settimeout(PATIENCE)
    connection.sock.connect(where)
    headers = FORGED if kind == socket.AF_UNIX else {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(ask(**more)), headers)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content["choices"][0]["text"]


def test_a_file_is_a_socket_of_its_user_alone(tmp_path: Path) -> None:
    """No page can reach it under any name, so it asks for none; it is gone when the server is."""
    file = tmp_path / "model.sock"
    with started(*FAKE, "--socket", str(file)) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"serving fake on the scripted engine at unix:{file}\n"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        status, text = asked(str(file))
        assert status == 200 and text
        server.terminate()
        out, errors = server.communicate(timeout=PATIENCE)
        assert (server.returncode, out, errors) == (0, "", "")
    assert not file.exists()


def test_a_file_that_a_killed_server_left_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "model.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(file))
    with listening("", 0, file) as listener:
        listener.listen()
        with pytest.raises(ShardmillError, match=f"{file}: another server listens there; choose another --socket"):
            next(iter(listening("", 0, file).gen))
    assert not file.exists()
    file.write_text("mine")
    for other in (file, tmp_path / "no" / "folder", tmp_path / ("x" * 200)):
        with pytest.raises(ShardmillError, match="can't listen at .*; choose another --socket"):
            next(iter(listening("", 0, other).gen))
    assert file.read_text() == "mine"


@pytest.mark.parametrize("options", [("--port",), ("--socket", "/no/such/folder/file")])
def test_an_address_in_use_is_told_before_anything_large_is_imported(options: tuple[str, ...]) -> None:
    watched = f"try:\n    cli.main()\nfinally:\n    print([one for one in {LARGE} if one in sys.modules])"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = [*options, str(taken.getsockname()[1])] if options == ("--port",) else [*options]
        code = f"import sys\nfrom shardmill import cli\nsys.argv[1:] = ['serve', 'no-build', *{given}]\n{watched}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == "[]\n"
    assert done.stderr.startswith("shardmill: can't listen at") and len(done.stderr.splitlines()) == 1


def test_a_socket_that_systemd_passes_on_is_served(tmp_path: Path) -> None:
    """Connections that came first are answered; the address is systemd's, whatever the options say."""
    program = shutil.which("systemd-socket-activate") or skip_or_fail("systemd is not installed")
    file = tmp_path / "given.sock"
    options = [f"--setenv={name}" for name in ("PYTHONPATH", "PATH", "PYTHONUNBUFFERED")]
    with started(program, "-l", str(file), *options, *FAKE, "--port", "1", "--socket", "/no/such") as server:
        wait_until(file.exists)
        assert asked(str(file))[0] == 200
        assert server.stdout is not None
        assert server.stdout.readline() == f"serving fake on the scripted engine at unix:{file}\n"
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=PATIENCE)
        assert server.returncode == 0 and file.exists()  # it is systemd's


PASSED_ON = """import os
os.dup2({0}, 3)
os.environ |= {{"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}}
from shardmill.cli import main
main()"""


@pytest.mark.thorough
def test_who_asks_after_the_end_of_the_engine_is_answered_by_the_next_server(built: tiny.Build, tmp_path: Path) -> None:
    """systemd keeps the socket, and starts the service again because it ends with an error, as docs/service/ asks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port, code = listener.getsockname()[1], PASSED_ON.format(listener.fileno())
        command = (sys.executable, "-c", code, "serve", str(build_folder(built, tmp_path)), "--no-check")
        model = json.loads((tmp_path / "model.json").read_text())["model"]
        with started(*command, files=[listener.fileno()]) as server:
            before = asked(port, model=model)
            (engine,) = psutil.Process(server.pid).children()
            engine.kill()
            _, errors = server.communicate(timeout=PATIENCE)
        assert server.returncode == 1 and errors.splitlines()[-1].startswith("shardmill: ") and "SIGKILL" in errors
        assert "Traceback" not in errors
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(asked, port, model=model)
            with started(*command, files=[listener.fileno()]):
                assert waiting.result(PATIENCE) == before


@pytest.mark.thorough(but=["stderr"])
@pytest.mark.parametrize("which", ["stdout", "stderr"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_a_full_disk_behind_its_output_ends_no_server(tmp_path: Path, which: str) -> None:
    file = tmp_path / "model.sock"
    with started("bash", "-c", f'exec "$@" {"" if which == "stdout" else "2"}> /dev/full', "bash", *FAKE, "--socket",
                 str(file), "--log-level", "info") as server:  # fmt: skip
        wait_until(lambda: server.poll() is not None or answers(str(file)))
        assert asked(str(file))[0] == 200
        server.terminate()
        server.communicate(timeout=PATIENCE)
        assert server.returncode == 0


def answers(file: str) -> bool:
    """Whether a server listens on a file."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(file) == 0


def test_two_sockets_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(ShardmillError, match="systemd passes on 2 sockets: give the socket's unit one ListenStream"):
        next(iter(listening("127.0.0.1", 0, None).gen))
    assert not {"LISTEN_PID", "LISTEN_FDS"} & os.environ.keys()
    monkeypatch.setenv("LISTEN_PID", "1")  # another process'
    monkeypatch.setenv("LISTEN_FDS", "1")
    with listening("127.0.0.1", 0, None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """As they stand in the docs, but for the program's place."""
    program = shutil.which("systemd-analyze") or skip_or_fail("systemd is not installed")
    for file in SERVICE.glob("shardmill.s*"):
        text = file.read_text().replace("/opt/shardmill/bin/shardmill", sys.executable)
        (tmp_path / file.name).write_text(text)
    units = [str(tmp_path / f"shardmill.{kind}") for kind in ("service", "socket")]
    done = subprocess.run([program, "verify", *units], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "shardmill" not in done.stderr, done.stderr
    assert re.search(r"^Restart=on-failure$", (SERVICE / "shardmill.service").read_text(), re.MULTILINE)


KEYS = {  # of launchd.plist(5), with their types
    "Label": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ExitTimeOut": int,
    "ProcessType": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}


def test_launchd_s_keys_have_their_types() -> None:
    """No launchd has read it: this is what its manual page says."""
    read = plistlib.loads((SERVICE / "shardmill.plist").read_bytes())
    assert {name: type(value) for name, value in read.items()} == KEYS
    assert read["KeepAlive"] == {"SuccessfulExit": False} and all(type(one) is str for one in read["ProgramArguments"])
    assert read["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")


@pytest.mark.thorough(but=["info-3"])
@pytest.mark.parametrize(("level", "lines"), [("info", 3), ("warning", 0), ("error", 0)])
def test_a_log_of_requests_has_no_texts(tmp_path: Path, level: str, lines: int) -> None:
    """Not of a body, a path, a query or a key; each line has its time and level, and how the request ended."""
    file, pieces = tmp_path / "model.sock", []
    environment = {"SHARDMILL_API_KEY": "secret-key"}
    with started(
        "env", *(f"{k}={v}" for k, v in environment.items()), *FAKE, "--socket", str(file), "--log-level", level
    ) as server:
        assert server.stdout is not None and server.stdout.readline()
        for path, key in (
            ("/v1/completions?q=secret", "secret-key"),
            ("/secret", "secret-key"),
            ("/v1/models/secret", "x"),
        ):
            connection = http.client.HTTPConnection("localhost")
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.connect(str(file))
            body = json.dumps(ask(prompt="secret", user="secret"))
            connection.request("POST", path, body, FORGED | {"Authorization": f"Bearer {key}"})
            pieces.append(connection.getresponse().status)
            connection.close()
        server.terminate()
        _, errors = server.communicate(timeout=PATIENCE)
    assert pieces == [200, 404, 401] and "secret" not in errors
    told = [re.fullmatch(r"[\d-]+ [\d:,]+ INFO POST (\S+) (\d+) in \d+\.\d{3} s", line) for line in errors.splitlines()]
    expected = [("/v1/completions", "200"), ("other", "404"), ("/v1/models", "401")]
    assert [one.groups() for one in told if one] == expected[:lines] and len(told) == lines
