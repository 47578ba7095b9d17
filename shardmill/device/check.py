"""Whether a build runs on this machine, on the Neural Engine, and rightly; the receipt of that in the user's cache.

Numbers decide what is right: each program is compared with the results that the build carries (runtime/expected.py).
Core ML's plan says where operations run; without Core ML, rules predict it. Sizes are compared with the limits of this
system.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kit_runner.kit import KIND as RESULT
from kit_runner.kit import RESULT_FORMAT
from kit_runner.main import system_identity
from portable_coreml.judge.limits import MIN_WEIGHT_BYTES, SYSTEMS, expected_on, limits

from shardmill import machine
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import cache_folder, digest, dumps, read_sealed, replacing, sealed, write_json
from shardmill.imports import quiet_coremltools
from shardmill.models.interface import TOWER
from shardmill.runtime.expected import NEAR_TIE, limit, read_expected
from shardmill.runtime.manifest import COMPILER, COMPLETE, EXPECTED, MARK, bucket_of, read_manifest

if TYPE_CHECKING:
    from shardmill.runtime.process import Remote

KIND = "check"  # of a receipt
RECEIPTS = "checks"  # the folder in the cache
PRIVATE = 0o600
PACKAGES = ("coremltools", "numpy", "torch")  # decide the portable engine's numbers, and how Core ML is called
RIGHT, WRONG, ELSEWHERE, UNTOLD = "right", "wrong", "off the engine", "not compared"
GIB = 1 << 30


@dataclass(frozen=True)
class Checked:
    """What was found of a part, or of the first answer.

    Attributes:
        name: the part's name.
        status: RIGHT; WRONG; ELSEWHERE if its numbers are right, and it does not run on the Neural Engine though it
            should; UNTOLD if the build has no results of it to compare with.
        said: the rest of a person's line.
        errors: by way, how far its results are from the recorded ones, relative to them.
        limit: how far they may be.
        counts: how many operations have each status, as residency/PART.json has it; and `evidence`, whether it was
            measured or predicted.
    """

    name: str
    status: str
    said: str
    errors: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    evidence: str = ""


ANSWER = "first answer"  # the name of its line


def check_parts(
    build: Path, manifest: Mapping[str, Any], model: Remote, precision: str, placement: bool = True
) -> Iterator[Checked]:
    """Check each part of a loaded build, and then its first answer.

    Args:
        build: the folder.
        manifest: the content of its model.json, which has results to compare with or not.
        model: the loaded build; its slots are forgotten.
        precision: the portable engine's precision.
        placement: whether to look where operations run, too. Without Core ML it is predicted, which takes time, and the
            build has been judged by the same rules.
    """
    recorded = read_expected(build / manifest[EXPECTED]["path"]) if EXPECTED in manifest else None
    for place, part in enumerate(manifest["parts"]):
        name = part["name"]
        expected = recorded.parts.get(name) if recorded else None
        placed = _placed(build, manifest, place, model) if placement else []
        where, off = _where(build, part, placed)
        counts = dict(Counter(row["status"] for row in placed))
        evidence = ("predicted" if machine.is_portable() else "measured") if placed else ""
        if expected is None or expected.why_not:
            why = expected.why_not if expected else "it was built before shardmill recorded results"
            yield Checked(name, ELSEWHERE if off else UNTOLD, f"{why}; {where}", counts=counts, evidence=evidence)
            continue
        allowed, errors = limit(expected, precision), model.errors(name)
        wrong = {way: error for way, error in errors.items() if not error <= allowed}  # NaN is not
        worst = max((wrong or errors).values(), key=lambda error: (error != error, error))
        ways = f" at {', '.join(wrong)}" if wrong and len(wrong) < len(errors) else ""
        said = f"{worst:.2g} of the result away{ways}, at most {allowed:.2g} is allowed; {where}"
        status = WRONG if wrong else ELSEWHERE if off else RIGHT
        yield Checked(name, status, said, _finite(errors), allowed, counts, evidence)
    if recorded and recorded.answer:
        difference = model.first_answer()
        told = difference or f"its {len(recorded.answer.tokens)} tokens are the recorded ones"
        yield Checked(ANSWER, WRONG if difference and not difference.startswith(NEAR_TIE) else RIGHT, told)


def _finite(errors: Mapping[str, float]) -> dict[str, float]:
    """Replace what JSON lacks."""
    return {way: error if error <= 1e30 else 1e30 for way, error in errors.items()}


def _placed(build: Path, manifest: Mapping[str, Any], place: int, model: Remote) -> list[dict[str, Any]]:
    """Return the operations of a part with their status: by Core ML's plan, or predicted from the package, if any.

    The programs of a drafter are not loaded, and Core ML plans nothing for them.
    """
    part = manifest["parts"][place]
    if not machine.is_portable():
        rows: list[dict[str, Any]] = [] if part.get("drafter") else model.operations(part["name"])
        return rows
    package = build / manifest.get("packages", {}).get(part["name"], {}).get("path", "nowhere")
    if not package.is_dir():
        return []
    tokens = bucket_of(manifest, part) if MARK in manifest else manifest["tokens_max"]
    fixed = MARK in manifest or part["kind"] == TOWER or any(part.get("functions", {}).values())
    with quiet_coremltools():
        from shardmill.gates import residency  # imports coremltools, which commands that check nothing leave out

        predicted, _ = residency.predict(package, tokens, fixed)
    return [asdict(row) for row in predicted]


def _where(build: Path, part: Mapping[str, Any], placed: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return where a part runs in words, and whether it should run on the Neural Engine and does not."""
    weight_bytes = _weights(build / part["program"]["path"])
    size = f"{weight_bytes / GIB:.2f} GiB" if weight_bytes >= GIB / 10 else f"{weight_bytes / 1e6:.1f} MB"
    system, small = _this_system(), weight_bytes < MIN_WEIGHT_BYTES
    most = limits(system).weight_bytes.most if system else None
    if small:
        said = f"{size}, so small that Core ML is expected to leave it to the CPU"
    elif most is None:
        said = f"{size}, expected on the Neural Engine of {expected_on(weight_bytes, SYSTEMS)}"
    else:
        said = f"{size}, {'over' if weight_bytes > most else 'within'} the {most / GIB:g} GiB that {system} takes"
    count = sum(row["status"] != "no_device" for row in placed)
    left = [row for row in placed if row["status"] in ("ineligible", "not_chosen", "unknown") and not small]
    told = "predicted off" if machine.is_portable() else "not on"
    if left:
        first = f"{left[0]['operation']} {left[0]['output']}"
        said += f"; {len(left)} of {count} operations {told} the Neural Engine, first {first}"
    return said, bool((most and weight_bytes > most) or left)


def _weights(program: Path) -> int:
    """Return the bytes of a program's weight file; the bundles of several functions have links to one."""
    return max((file.stat().st_size for file in program.rglob("weights/*")), default=0)


def _this_system() -> str:
    """Return the newest system with known limits that is not newer than this one; "" if this is no Mac."""
    version = machine.macos().partition(".")[0]
    known = [name for name in SYSTEMS if name.startswith("macOS") and version.isdecimal()]
    return next((name for name in reversed(known) if int(name.split()[1]) <= int(version)), "")


def compiled_elsewhere(manifest: Mapping[str, Any]) -> str:
    """Return the other system for which a build's bundles were compiled, in the engine's words; "" if there is none."""
    here = machine.engine()
    made = [part["program"].get(COMPILER, {}) for part in manifest["parts"]]
    others = {f"macOS {one.get('macos')} ({one.get('build')})" for one in made if one.get("name") == "coreml"}
    this_system = f"macOS {here.get('macos')} ({here.get('build')})"
    return ", ".join(sorted(others - {this_system}))


def verdict(parts: Sequence[Checked]) -> str:
    """Return the worst status; a part that could not be compared counts only if none could."""
    return next((status for status in (WRONG, ELSEWHERE, RIGHT) if any(one.status == status for one in parts)), UNTOLD)


def receipt_key(build: Path, precision: str) -> dict[str, Any]:
    """Return what a check belongs to: the build's bytes, and the engine with its system's build and chip."""
    portable = machine.is_portable()
    return {
        "build": hash_file(build / "model.json"),
        "engine": machine.engine() | ({"precision": precision} if portable else {}),
        "packages": machine.package_versions(PACKAGES),
        "processor": machine.machine()["processor"],
    }


def _receipt_file(key: Mapping[str, Any]) -> Path:
    """Return where the receipt of a check lies."""
    return cache_folder() / RECEIPTS / f"{digest(key)[:32]}.json"


def known(key: Mapping[str, Any]) -> str:
    """Return the verdict of an earlier check; "" if there was none, or its receipt can't be read."""
    with suppress(UnreadableError):
        return str(read_sealed(_receipt_file(key)).get("verdict", ""))
    return ""


def note_down(key: Mapping[str, Any], manifest: Mapping[str, Any], checked: Sequence[Checked]) -> Path | None:
    """Write the receipt, which only this user may read; None if the cache can't be written to."""
    file = _receipt_file(key)
    content = {"kind": KIND, "format": 1, **key, "model": manifest["model"], "time": int(time.time())}
    content |= {"machine": system_identity()}
    content |= {"verdict": verdict(checked), "parts": [asdict(one) for one in checked]}
    try:
        with replacing(file) as new:
            new.touch(PRIVATE)
            new.write_text(dumps(sealed(content)), encoding="utf-8")
    except OSError:
        return None
    return file


@contextmanager
def result_of_check(file: Path, builds: Sequence[Path]) -> Iterator[tuple[Path, Sequence[Path]]]:
    """Yield a file in the form of measure.py's results, and the builds that it may be about.

    Args:
        file: the receipt of a check, which is turned into such a file, or any other file, which is left as it is.
        builds: folders of finished builds.

    Raises:
        ShardmillError: it is the receipt of another build.
    """
    content: dict[str, Any] = {}
    with suppress(UnreadableError):
        content = read_sealed(file)
    if content.get("kind") != KIND:
        yield file, builds
        return
    checked = [build for build in builds if hash_file(build / "model.json") == content["build"]]
    if not checked:
        names = ", ".join(map(str, builds)) or "none"
        raise ShardmillError(f"{file}: is of a check of {content['model']}, and of none of the builds here: {names}")
    with TemporaryDirectory() as folder:
        manifest = read_manifest(checked[0], COMPLETE)
        write_json(Path(folder) / "result.json", _as_result(content, checked[0], manifest))
        yield Path(folder) / "result.json", checked


def _as_result(receipt: Mapping[str, Any], build: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a receipt in the form of measure.py's results, which a build keeps as evidence."""
    from shardmill.device.kit import kit_description

    lines: dict[str, dict[str, Any]] = {}
    for one in receipt["parts"]:
        for way, error in one["errors"].items():
            name = way if way.startswith("T=") else way.replace(" ", "-")
            status = "ok" if error <= one["limit"] else "wrong"
            told = {"value": {"relative_error": error, "limit": one["limit"]}, "timing": {}, "detail": one["said"]}
            lines[f"{one['name']}/check.{name}"] = {"status": status, **told}
    variant = {
        "model": manifest["model"],
        "source": manifest.get("source", {}),
        "described": kit_description(build, manifest),
        "artifacts": {part: entry["files"] for part, entry in manifest["packages"].items()},
        "measurements": lines,
    }
    engine, about = {"name": receipt["engine"]["name"]}, {"kit": receipt["build"], "machine": receipt["machine"]}
    content = {"format": RESULT_FORMAT, "kind": RESULT, "engine": engine, **about}
    return sealed(content | {"variants": {manifest["model"]: variant}})


def told(build: Path, checked: Sequence[Checked]) -> str:
    """Return the result in one line, with what to do next."""
    ended, parts = verdict(checked), [one for one in checked if one.name != ANSWER]
    bad = [f"{one.name}: {one.said}" for one in checked if one.status == ended]
    others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    if ended == WRONG:
        return f"{build}: WRONG on this machine: {bad[0]}{others}; {_next(build)}"
    if ended == ELSEWHERE:
        return f"{build}: right, but not on the Neural Engine: {bad[0]}{others}; {SMALLER}"
    if ended == UNTOLD:
        return f"{build}: loads, and has no results to compare with: {parts[0].said.partition(';')[0]}"
    compared = sum(one.status == RIGHT for one in parts)
    rest = f" of {len(parts)}" if compared < len(parts) else ""
    answer = next((f", {ANSWER}: {one.said}" for one in checked if one.name == ANSWER), "")
    return f"{build}: right on this machine: {compared}{rest} programs{answer}"


SMALLER = "for an engine that takes it, build with `shapes: fixed`, then `state: host`, then smaller parts"


def _next(build: Path) -> str:
    again = "pull or build it again"
    if machine.is_portable():
        return f"{again}; --no-check runs it all the same"
    return f"{again}; if it stays wrong, `shardmill device kit {build}` measures why; --no-check runs it all the same"
