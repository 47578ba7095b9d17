"""An app can depend on the package by an address and a version, and writes nothing but `import Shardmill`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import succeeded

from .programs import ROOT, SWIFT

pytestmark = pytest.mark.slow
CLIENT = """// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "app", platforms: [.macOS(.v15)],
    dependencies: [.package(url: "file://REPOSITORY", from: "0.1.0")],
    targets: [.executableTarget(name: "app", dependencies: [.product(name: "Shardmill", package: "shardmill")])])
"""
APP = """import Foundation
import Shardmill

struct Screen {
    var reason: FinishReason?
    var error: ShardmillError?
    var manifest: Manifest?
    var spans: [Span] = []
    var calls: [FunctionCall] = FunctionCall.read("none").calls
}

func open(_ folder: URL, codec: (any TextCodec)?) throws -> Chat {
    let model = try ShardmillModel(at: folder, codec: codec, context: .slide)
    return model.chat(instructions: model.manifest.chat?.system == nil ? "" : "Be brief.")
}

do { _ = try open(URL(fileURLWithPath: "/nothing"), codec: nil) } catch let error as ShardmillError {
    print(Screen(error: error).error?.message ?? "")
}
"""


def git(folder: Path, *arguments: str) -> None:
    named = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    succeeded(subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=False))


def test_an_app_depends_on_a_tag(tmp_path: Path) -> None:
    found = os.pathsep.join([*filter(None, [os.environ.get(SWIFT)]), os.environ["PATH"]])
    swift = shutil.which("swift", path=found)
    if swift is None:
        pytest.skip(f"there is no swift: install it, or set {SWIFT} (.ci/install-swift)")
    repository, app = tmp_path / "shardmill", tmp_path / "app"
    listed = subprocess.run(["git", "ls-files", "swift"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ["Package.swift", *listed.stdout.split()]:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, repository / name)
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    git(repository, "tag", "v0.1.0")
    (app / "Sources" / "app").mkdir(parents=True)
    (app / "Package.swift").write_text(CLIENT.replace("REPOSITORY", str(repository)))
    (app / "Sources" / "app" / "main.swift").write_text(APP)
    # Some ways to run Swift see no folder but the one that they run in.
    options = ["--package-path", "app", "--cache-path", "cache"]
    for command in (["package", *options, "resolve"], ["build", *options]):
        succeeded(subprocess.run([swift, *command], cwd=tmp_path, capture_output=True, text=True, check=False))
    assert '"version" : "0.1.0"' in (app / "Package.resolved").read_text()
    folder = os.environ.get(SWIFT)
    runs = [str(Path(folder, "swift-exec"))] if folder else []
    command = [*runs, str(app / ".build" / "debug" / "app")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    succeeded(done)
    assert done.stdout == "/nothing/model.json can't be read: is this the folder of a finished build?\n"
