"""Run the README's commands on the simulated Mac, as its reader would: python tests/mac/commands.py

In a copy of this checkout, in a folder that is reached through a symbolic link, as macOS's temporary folders are. Each
command is a line with its seconds; the first wrong thing ends the run with exit code 1. Among the commands: the demo
from nothing; a small encoder that was built on Linux, comes to the Mac, and lives through an update of the system.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from count import read, table

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tests/mac/run"
PIECE = "tests/mac/piece.yaml"  # config of the small encoder
UPDATE = {"MAC_VERSION": "26.1", "MAC_BUILD": "25B78"}
MOST = {"loads": 24, "first passes": 40}  # of one `all` of the demo: eight programs
LOADING = 240  # seconds of a load, whose end nothing here waits for
HANGS = 600.0  # seconds after which nothing will come
SOON = LOADING / 2  # seconds for an answer, or an end, that did not wait for a load
TEXT = "Anna Schmidt wrote to anna@example.org."


@dataclass(frozen=True)
class Place:
    """Where commands run.

    Attributes:
        folder: the copy of the checkout.
        temporary: TMPDIR.
        mac: whether it is the simulated Mac, or Linux.
        switches: of the simulated Mac.
    """

    folder: Path
    temporary: Path
    mac: bool = True
    switches: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a command."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAC_", "OMP_"))}
        paths = ":".join(str(self.folder / name) for name in ("", "decoding", "kit", "lab", "portable"))
        return kept | {"PYTHONPATH": paths, "TMPDIR": str(self.temporary)} | dict(self.switches)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command as it is started."""
        return [str(RUN), *words] if self.mac else list(words)


def fail(why: str) -> NoReturn:
    """End the run."""
    print(f"FAILED  {why}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def demand(holds: bool, why: str) -> None:
    """End the run unless something holds."""
    if not holds:
        fail(why)


def report(place: Place, words: Sequence[str], started: float) -> None:
    """Print a command that was right."""
    where = " after an update" if UPDATE.items() <= place.switches.items() else "" if place.mac else " on Linux"
    print(f"ok {time.monotonic() - started:7.1f} s  {' '.join(words)}{where}", flush=True)


def say(place: Place, *words: str, says: str = "", given: str = "", code: int = 0, folder: Path | None = None) -> str:
    """Run a command.

    Args:
        place: where.
        words: the command.
        says: a regular expression that its output must match.
        given: its standard input.
        code: the exit code that is right.
        folder: the current folder; None is the place's.

    Returns:
        What it printed, errors included.
    """
    started = time.monotonic()
    done = subprocess.run(
        place.command(words),
        cwd=folder or place.folder, env=place.environment(), input=given, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    shown = f"{' '.join(words)}\n{done.stdout[-4000:]}"
    demand(done.returncode == code, f"exit code {done.returncode}, not {code}: {shown}")
    demand(bool(re.search(says, done.stdout)), f"nothing says {says!r}: {shown}")
    report(place, words, started)
    return done.stdout


def engines(build: Path) -> dict[str, dict[str, Any]]:
    """Return the engine of each receipt of a build that names one, by the receipt's name."""
    found = {}
    for path in sorted(build.rglob("*.receipt.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "engine" in content:
            found[str(path.relative_to(build))] = content["engine"]
    return found


def check_engine(build: Path, name: str, system_build: str = "") -> None:
    """Check that every receipt of steps that load programs names one engine."""
    found = engines(build)
    demand(bool(found), f"{build}: no receipt names an engine")
    for receipt, engine in found.items():
        fits = engine["name"] == name and engine.get("build", "") == system_build
        demand(fits, f"{build / receipt}: the engine is {engine}, not {name} {system_build}")


def check_report(build: Path) -> None:
    """Check that the report says "measured" and names Core ML, and that no row of residency is predicted."""
    text = (build / "report.html").read_text(encoding="utf-8")
    demand("measured" in text and "Core ML" in text, f"{build}/report.html does not say measured, Core ML")
    demand("predicted" not in {row["evidence"] for row in rows(build)}, f"{build}: residency is predicted")


def rows(build: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a build's residency."""
    for path in sorted((build / "residency").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        yield from content.get("rows", ())


def check_nothing_left(place: Place) -> None:
    """Check that no compiled program stays in the temporary folder."""
    left = sorted(path.name for path in place.temporary.rglob("*.mlmodelc"))
    demand(not left, f"{len(left)} compiled programs are left in the temporary folder: {left[:3]}")


def check_counts(log: Path) -> None:
    """Print what one `all` cost, and compares it with what it may cost."""
    head, *jobs, total = table(read(log))
    for line in (head, *jobs, total):
        print("            " + "  ".join(cell.ljust(16) for cell in line).rstrip(), flush=True)
    counts = dict(zip(head, total, strict=True))
    for what, most in MOST.items():
        demand(int(counts[what]) <= most, f"one all has {counts[what]} {what}, more than {most}")


def the_demo(place: Place) -> None:
    """Run the README, from its first command on."""
    log = place.temporary / "all.log"
    build = place.folder / "build/demo"
    say(place, "shardmill", "doctor", says="Core ML")
    say(replace(place, switches={"MAC_LOG": str(log)}), "snakemake", "--cores", "2", "all")
    check_engine(build, "coreml", "24G84")
    check_report(build)
    check_nothing_left(place)
    check_counts(log)
    say(place, "snakemake", "--cores", "2", "all", says="Nothing to be done")
    written = say(place, "shardmill", "generate", "build/demo", "--prompt", "def ", "--max-new-tokens", "8", "--json")
    demand(json.loads(written.splitlines()[-1])["engine"] == "coreml", f"generate ran on another engine: {written}")
    say(
        place,
        "shardmill",
        "chat",
        "build/demo",
        "--max-new-tokens",
        "8",
        given="def \n/new\nimport \n/exit\n",
        says="demo",
    )
    tonight(place)
    serving(place)
    while_loading(place, "build/demo")
    short = ("--prompt-tokens", "20", "--task", "copying", "--prompts-per-task", "1", "--new-tokens", "8")
    less = ("--repetitions", "1", "--drafter", "ngram", "--output", "speed.json")
    say(place, "shardmill", "bench", "build/demo", *short, *less)
    speed = json.loads((place.folder / "speed.json").read_text(encoding="utf-8"))
    demand(speed["engine"]["name"] == "coreml", f"speed.json names {speed['engine']}")
    releasing(place)


def tonight(place: Place) -> None:
    """Run what docs/on-a-mac.md tells to do with one's own model, with the demo in its place."""
    page = (ROOT / "docs/on-a-mac.md").read_text(encoding="utf-8")
    section = page.partition("## Phi-4-mini tonight\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("phi-4-mini", "demo").splitlines()
    demand(len(lines) == 8, f"docs/on-a-mac.md shows {len(lines)} commands, not 8")
    for line in lines:
        words = shlex.split(line)
        if "--web" in words:
            with server(place, words) as (process, address):
                with urllib.request.urlopen(address, timeout=HANGS) as answer:
                    demand(b"page/page.js" in answer.read(), f"{address} is not the page")
                process.send_signal(signal.SIGINT)
                process.wait(timeout=HANGS)
        else:
            say(place, *words)


def serving(place: Place) -> None:
    """Ask a server as the README does; SIGTERM ends it."""
    words = ("shardmill", "serve", "build/demo", "--port", "0")
    with server(place, words) as (process, address):
        started = time.monotonic()
        client = (
            "import sys; from openai import OpenAI; client = OpenAI(base_url=sys.argv[1] + '/v1', api_key='none');"
            "print(client.completions.create(model='demo', prompt='def ', max_tokens=8, temperature=0).choices[0].text)"
        )
        body = json.dumps({"model": "demo", "prompt": "def ", "max_tokens": 8, "temperature": 0})
        asked = urllib.request.Request(f"{address}/v1/completions", body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=HANGS) as answer:
            text = json.load(answer)["choices"][0]["text"]
        said = subprocess.check_output([sys.executable, "-c", client, address], text=True)
        demand(bool(text) and said == f"{text}\n", f"OpenAI's client got {said!r}, and urllib {text!r}")
        report(place, ("curl", "and", "OpenAI's", "client"), started)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=LOADING)
        took = time.monotonic() - started
        demand(took < SOON, f"SIGTERM took {took:.1f} s to end the server")
        report(place, ("kill", "the", "server"), started)


def while_loading(place: Place, build: str) -> None:
    """Load programs for LOADING seconds each, with Python's lock held: a server answers, and signals end commands."""
    slow = replace(place, switches={**place.switches, "MAC_LOAD_SECONDS": str(LOADING)})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("shardmill", "serve", build, "--warm", "--port", str(port))
    with started_at(slow, words, port):
        started, slowest = time.monotonic(), 0.0
        for _ in range(40):
            asked = time.monotonic()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SOON)
                fail("the server was ready before its programs can be loaded")
            except urllib.error.HTTPError as error:
                demand(error.code == 503, f"/health answers {error.code} while programs load")
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.1)
        demand(slowest < SOON, f"/health took {slowest:.2f} s while a program was loaded")
        report(place, (*words, "answers", f"/health within {slowest:.2f} s"), started)
    commands = {"serve": words, "generate": ("shardmill", "generate", build, "--prompt", "x")}
    commands["warm"] = ("shardmill", "warm", build)
    log = place.temporary / "loads.log"
    for command, number in itertools.product(commands.values(), (signal.SIGINT, signal.SIGTERM)):
        log.unlink(missing_ok=True)
        process = begun(replace(slow, switches={**slow.switches, "MAC_LOG": str(log)}), command)
        wait_until(lambda: log.exists() and '"waiting"' in log.read_text(encoding="utf-8"), process)
        started = time.monotonic()
        process.send_signal(number)
        said, _ = process.communicate(timeout=LOADING)
        took = time.monotonic() - started
        demand(took < SOON, f"{number.name} ended {command} after {took:.1f} s, in a load: {said}")
        report(place, (*command, f"ends {took:.1f} s after {number.name}"), started)


def begun(place: Place, words: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command, in a group of processes of its own."""
    return subprocess.Popen(
        place.command(words), cwd=place.folder, env=place.environment(), text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something holds, while a process runs."""
    started = time.monotonic()
    while not holds():
        demand(process.poll() is None and time.monotonic() - started < HANGS, f"{process.args} does not get that far")
        time.sleep(0.05)


@contextmanager
def started_at(place: Place, words: Sequence[str], port: int) -> Iterator[None]:
    """Run a server that listens before it has loaded; it has ended afterwards."""
    process = begun(place, words)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, process)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def server(place: Place, words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server, and give it and its address once it answers; it has ended afterwards."""
    started = time.monotonic()
    process = subprocess.Popen(
        place.command(words), cwd=place.folder, env=place.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address, said = "", ""
        for line in process.stdout:
            said += line
            found = re.search(r"http://[\d.]+:\d+", line)
            if found:
                address = found[0]
                break
        demand(bool(address), f"{' '.join(words)} names no address: {said}")
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=HANGS):
                    break
            except OSError as error:
                demand(process.poll() is None and time.monotonic() - started < HANGS, f"/health: {error}")
                time.sleep(0.2)
        report(place, words, started)
        yield process, address
    finally:
        process.kill()
        process.wait()


def releasing(place: Place) -> None:
    """Sign a build, verifies it, and prepares its publication."""
    keys = place.temporary
    make = ("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(keys / "signing.key"))
    subprocess.run(make, check=True, capture_output=True)
    public = ("openssl", "ec", "-in", str(keys / "signing.key"), "-pubout", "-out", str(keys / "signing.pub"))
    subprocess.run(public, check=True, capture_output=True)
    (place.folder / "build/demo/.DS_Store").write_bytes(b"\0\0\0\1Bud1")  # the Finder has shown the folder
    say(place, "shardmill", "sign", "build/demo", "--key", str(keys / "signing.key"))
    say(place, "shardmill", "verify", "build/demo", "--key", str(keys / "signing.pub"), says="signed")
    signed = ("--license", "psf-2.0", "--key", str(keys / "signing.key"))
    offered = say(place, "shardmill", "publish", "build/demo", "nobody/demo", "--dry-run", *signed, says="uploaded")
    demand(".DS_Store" not in offered, "publish would upload .DS_Store")


def the_encoder(place: Place) -> None:
    """Build a small encoder on Linux, finish it on the Mac, measure it by a kit, and build it after an update."""
    linux = replace(place, mac=False)
    build = place.folder / "build/piece"
    every = ("snakemake", "--cores", "2", "all", "--configfile", PIECE)
    write = "import sys; sys.path.insert(0, 'tests'); from models.tiny_encoders import write_tiny; "
    make = f"{write}from pathlib import Path; write_tiny('bert', Path('checkpoints/piece'))"
    say(linux, sys.executable, "-c", make)
    say(linux, *every)
    check_engine(build, "portable")
    say(linux, "shardmill", "device", "kit", "build/piece", "-o", "kit.zip")
    say(place, "shardmill", "why", "build/piece", "--configfile", PIECE, says=r"compiled/\S+ +works")
    say(place, *every)
    check_engine(build, "coreml", "24G84")
    check_report(build)
    say(place, *every, says="Nothing to be done")
    say(place, "shardmill", "device", "kit", "build/piece", "-o", "kit-of-a-mac.zip")
    say(place, "shardmill", "label", "build/piece", "--text", TEXT, "--json", says="spans|labels")
    say(place, "unzip", "-q", "kit.zip")
    say(
        place,
        "python",
        "measure.py",
        "--passes",
        "3",
        says="send this file back",
        folder=place.folder / "shardmill-kit",
    )
    check_measured(json.loads((place.folder / "shardmill-kit/result.json").read_text(encoding="utf-8")))
    say(place, "shardmill", "device", "import", "shardmill-kit/result.json")
    say(place, *every)
    updated = replace(place, switches=UPDATE)
    say(updated, "shardmill", "why", "build/piece", "--configfile", PIECE, says=r"compiled/\S+ +works")
    worked = say(updated, *every, "--verbose")
    for step in ("compile", "residency", "parity", "benchmark"):
        demand(bool(re.search(rf"shardmill {step}.*: worked", worked)), f"{step} did not run after the update")
    check_engine(build, "coreml", UPDATE["MAC_BUILD"])
    check_report(build)
    say(updated, *every, says="Nothing to be done")


def check_measured(result: Mapping[str, Any]) -> None:
    """Check that all was measured that a Mac can measure without sudo."""
    found = {
        f"{name}/{key}": record["status"]
        for name, variant in result["variants"].items()
        for key, record in variant["measurements"].items()
    }
    wrong = {key: status for key, status in found.items() if status != "ok" and "energy" not in key}
    demand(bool(found) and not wrong, f"measure.py: {wrong or 'nothing was measured'}")


def copied(folder: Path) -> None:
    """Copy the files that git tracks, or would add, as they are now."""
    names = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def main() -> None:
    """Run all, in a folder that is removed unless one was named."""
    parser = argparse.ArgumentParser(description="Runs the README's commands on the simulated Mac.")
    parser.add_argument("--folder", type=Path, help="where; it stays. Default: a temporary folder, which does not")
    parser.add_argument("--only", choices=("demo", "encoder"), help="a part of the commands")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        real = (options.folder or Path(scratch)).resolve() / "private"
        (real / "T").mkdir(parents=True, exist_ok=True)
        link = real.parent / "var"
        link.unlink(missing_ok=True)
        link.symlink_to(real, target_is_directory=True)
        place = Place(link / "shardmill", link / "T")
        copied(place.folder)
        if options.only != "demo":
            the_encoder(place)
        if options.only != "encoder":
            the_demo(place)
    print(f"every command did what it should, in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
