"""The server's process: ready when it says so, gone afterwards, and its last words when it can't start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import psutil
import pytest
from patience import wait_until

from shardmill.bench.server import FOLLOW, command, running
from shardmill.errors import ShardmillError

SAYS = "print('serving small on the portable engine (2 threads) at http://127.0.0.1:1/v1', flush=True)"


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_it_is_ready_once_it_says_where_it_listens() -> None:
    """Other lines come before; the time counts from the start of the process."""
    with running(python(f"import time; print('loading'); time.sleep(0.2); {SAYS}; time.sleep(3600)")) as server:
        assert (server.model, server.url) == ("small", "http://127.0.0.1:1")
        assert server.ready_seconds >= 0.2


def test_it_is_gone_after_the_block_even_if_that_fails(tmp_path: Path) -> None:
    """No server is left behind."""
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); {SAYS}; time.sleep(3600)"
    with pytest.raises(ZeroDivisionError), running(python(script)):
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_it_is_gone_after_its_parent_was_killed() -> None:
    """With SIGKILL, which lets no block end; else the model would stay in memory for good."""
    says = "print('serving', os.getpid(), 'on the portable engine at http://127.0.0.1:1/v1', flush=True)"
    server = python(f"{FOLLOW}; import os, time; {says}; time.sleep(3600)")
    parent = f"""
import time
from shardmill.bench.server import running
with running({server!r}) as up:
    print(up.model, flush=True)
    time.sleep(3600)
"""
    process = subprocess.Popen(python(parent), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert FOLLOW in command(Path("build"), None, "fp32")[2]


def test_why_it_did_not_start_is_its_last_line() -> None:
    script = "import sys; print('loading'); sys.exit('first\\nshardmill: the weights are gone')"
    last = "^the server ended before it was ready: the weights are gone$"
    with pytest.raises(ShardmillError, match=last), running(python(script)):
        pass


def test_what_it_said_is_shown_when_a_request_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The error's line says that its log has the reason."""
    script = f"import sys, time; print('out of luck', file=sys.stderr, flush=True); {SAYS}; time.sleep(3600)"
    with pytest.raises(ShardmillError, match="refused"), running(python(script)):
        raise ShardmillError("the server refused a request")
    assert "out of luck" in capsys.readouterr().err


def test_a_key_for_other_servers_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMILL_API_KEY", "secret")
    check = "import os; assert 'SHARDMILL_API_KEY' not in os.environ"
    with running(python(f"{check}; {SAYS}; import time; time.sleep(3600)")):
        pass


def test_the_threads_are_those_that_the_server_says_it_has() -> None:
    """Core ML's server says nothing of them."""
    one, none = SAYS.replace("2 threads", "1 thread"), SAYS.replace(" (2 threads)", "")
    for says, threads in ((SAYS, 2), (one, 1), (none, None)):
        with running(python(f"{says}; import time; time.sleep(3600)")) as server:
            assert server.threads == threads


def test_the_command_starts_a_server() -> None:
    """`shardmill serve` itself, as far as it comes without a build."""
    with (
        pytest.raises(ShardmillError, match=r"build the model first"),
        running(command(Path("/nowhere"), None, "fp32")),
    ):
        pass
    options = ["--precision", "fp16", "--prefix-cache-bytes", "0", "--draft-build", "b"]  # prompts are computed anew
    assert command(Path("a"), Path("b"), "fp16")[-6:] == options


def test_a_scripted_model_answers_as_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first line to an answer, over a real socket."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (Path(__file__).parents[1], *map(Path, sys.path)))))
    arguments = [sys.executable, "-m", "bench.scripted", "serve", "none", "--port", "0", "--no-check"]
    with running(arguments) as server:
        assert httpx2.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"] == server.model
