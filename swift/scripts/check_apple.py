"""Type-checks the Swift package as Xcode would, without Apple's SDKs, once for each of Apple's platforms.

    python swift/scripts/check_apple.py                       # two minutes; `swift` on PATH or in SHARDMILL_SWIFT
    python swift/scripts/check_apple.py --commit 3757965f     # a commit's sources, against today's stubs
    python swift/scripts/check_apple.py --platforms catalyst  # some of the platforms

`swift build` on Linux can't see three kinds of errors. Apple's modules are resilient, so a `switch` over an enum of
theirs that is not frozen needs `@unknown default`: here stubs are compiled with library evolution and in language
mode 5, as Apple's interface says of CoreML. What stands behind a condition for another system is never read: here
`os`, `arch`, `canImport` and `targetEnvironment` are resolved for the platform before the compiler sees a file. And
what a platform lacks is there on Linux: here a declaration that is unavailable stands in its place
(swift/Stubs/Platforms).

A compiler for Linux knows none of Apple's versions: tests/swift/test_signatures.py compares these. Exits with 1, and
the compiler's lines, if anything is wrong.
"""

import argparse
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path("swift/Stubs")


@dataclass(frozen=True)
class Platform:
    """What conditions say on a platform.

    Attributes:
        system: for which `os()` is true; Catalyst is iOS.
        processor: for which `arch()` is true.
        environment: for which `targetEnvironment()` is true, or none.
        stubs: files of swift/Stubs/Platforms that every module is compiled with.
    """

    system: str
    processor: str
    environment: str = ""
    stubs: tuple[str, ...] = ("ObjectiveC.swift",)


PLATFORMS = {
    "ios": Platform("iOS", "arm64"),
    "macos": Platform("macOS", "arm64"),
    "catalyst": Platform("iOS", "x86_64", "macCatalyst", ("ObjectiveC.swift", "Intel.swift")),
    "visionos": Platform("visionOS", "arm64"),
}
IMPORTABLE = {"CoreML", "Darwin", "Dispatch", "Foundation", "FoundationModels", "ObjectiveC", "Synchronization", "os"}
IMPORTABLE |= {"FoundationNetworking"}  # where Linux has URLSession, which is Foundation's on Apple's systems
APPLE = {"CoreML": "CoreML", "FoundationModels": "FoundationModels", "os": "Platforms/os"}
# In the order in which they see each other; as Package.swift has them.
PACKAGE = {
    "ShardmillDecode": "swift/Sources/Decode",
    "ShardmillText": "swift/Sources/Text",
    "ShardmillCoreML": "swift/Sources/CoreML",
    "Shardmill": "swift/Sources/Shardmill",
    "ShardmillPipe": "swift/Sources/Pipe",
    "shardmill_check": "swift/Sources/Check",
}
TERM = re.compile(r"(os|arch|canImport|targetEnvironment)\(([^()]*)\)|&&|\|\||!|[()]|\s+")


def holds(condition: str, platform: Platform) -> bool:
    """Return whether a condition is true on a platform.

    Raises:
        ValueError: for a condition of another kind, so that no branch is chosen unseen.
    """
    if TERM.sub("", condition):
        raise ValueError(f"can't resolve '#if {condition.strip()}'")

    def term(match: re.Match[str]) -> str:
        kind, value = match.group(1), (match.group(2) or "").split(",")[0].strip()
        true_of = {"os": {platform.system}, "arch": {platform.processor}, "canImport": IMPORTABLE}
        if kind is None:
            return {"&&": " and ", "||": " or ", "!": " not "}.get(match.group(), match.group())
        return str(value in true_of.get(kind, {platform.environment}))

    return bool(eval(TERM.sub(term, condition).strip(), {"__builtins__": {}}))  # of nothing but what `term` wrote


def resolved(text: str, platform: Platform) -> str:
    """Return a file's text with what a platform leaves out made blank, so that lines keep their numbers.

    Raises:
        ValueError: for a condition of a kind that can't be resolved.
    """
    lines: list[str] = []
    stack: list[tuple[bool, bool]] = []  # whether this branch is read; whether no later one may be
    for line in text.splitlines():
        directive = re.match(r"\s*#(if|elseif|else|endif)\b(.*)", line)
        if directive is None:
            lines.append(line if not stack or stack[-1][0] else "")
            continue
        lines.append("")
        word, condition = directive.group(1), directive.group(2).split("//")[0]
        around = stack[-1][0] if stack and word == "if" else True
        done = not around if word == "if" else stack.pop()[1]
        if word != "endif":
            chosen = not done and (word == "else" or holds(condition, platform))
            stack.append((chosen, done or chosen))
    return "\n".join(lines) + "\n"


def problems(swift: str, sources: Path, platform: Platform, scratch: Path) -> list[str]:
    """Return what the compiler says against a stub or the package on a platform, up to the first module at fault.

    A module that reads the same on another platform, as do all that it sees, is compiled once.
    """
    modules = {name: ROOT / STUBS / folder for name, folder in APPLE.items()}
    modules |= {name: sources / folder for name, folder in PACKAGE.items()}
    seen: list[str] = []
    read = hashlib.sha256()
    for name, folder in modules.items():
        stubs = () if name in APPLE else platform.stubs
        files = [*sorted(folder.rglob("*.swift")), *(ROOT / STUBS / "Platforms" / stub for stub in stubs)]
        texts = {file.name: resolved(file.read_text(encoding="utf-8"), platform) for file in files}
        read.update(repr((name, texts)).encode())
        place = scratch / read.hexdigest()[:16] / name
        built = place.parent.relative_to(ROOT)  # some ways to run Swift see no folder but this one
        seen += ["-I", str(built)]
        if (place.parent / f"{name}.swiftmodule").exists():
            continue
        place.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (place / file).write_text(text, encoding="utf-8")
        flags = ["-swift-version", "6"]
        if name in APPLE:  # the warning is that Linux's Foundation is not resilient
            flags = ["-swift-version", "5", "-enable-library-evolution", "-suppress-warnings"]
        flags += [] if "main.swift" in texts else ["-parse-as-library"]
        flags += ["-package-name", "shardmill", "-module-name", name, *seen, "-o", str(built / f"{name}.swiftmodule")]
        command = [swift, "-frontend", "-emit-module", *flags, *(str(built / name / file) for file in texts)]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if re.search(r": (error|warning): ", line)]
        if done.returncode and not said:
            said = [f"{name}: the compiler ended with {done.returncode}: {done.stderr.strip()}"]
        if said:
            (place.parent / f"{name}.swiftmodule").unlink(missing_ok=True)  # there is one despite warnings
            return list(dict.fromkeys(line.removeprefix(f"{built}/") for line in said))
    return []


def main() -> int:
    """Check the platforms that are asked for and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", help="whose sources to check; this checkout's if left out")
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=[*PLATFORMS])
    arguments = parser.parse_args()
    swift = shutil.which("swift", path=os.pathsep.join([os.environ.get("SHARDMILL_SWIFT", ""), os.environ["PATH"]]))
    if swift is None:
        print("there is no swift: install it, or set SHARDMILL_SWIFT (.ci/install-swift)", file=sys.stderr)
        return 1
    (ROOT / ".build").mkdir(exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="apple-", dir=ROOT / ".build") as folder:
        sources, scratch = ROOT, Path(folder, "modules")
        if arguments.commit:
            sources = Path(folder, "sources")
            packed = subprocess.run(
                ["git", "archive", arguments.commit, "swift"], cwd=ROOT, check=True, capture_output=True
            )
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(sources, filter="data")
        for name in arguments.platforms:
            start = time.monotonic()
            errors = problems(swift, sources, PLATFORMS[name], scratch)
            failed = failed or bool(errors)
            print(f"{name}: {'wrong' if errors else 'right'} ({time.monotonic() - start:.0f} s)", flush=True)
            print("".join(f"  {line}\n" for line in errors), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
