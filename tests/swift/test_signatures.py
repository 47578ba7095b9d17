"""The stubs of Apple's modules declare what Apple's pages declare, so that nobody mends a compile error in a stub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

STUBS = Path(__file__).parents[2] / "swift" / "Stubs"
MODULES = ("CoreML", "FoundationModels")
ENTRIES = json.loads((STUBS / "signatures.json").read_text(encoding="utf-8"))
TYPE = re.compile(r"(?:public |open |final )*(?:enum|struct|class|protocol) (?!func)(\w+)")
MEMBER = re.compile(
    r"(?:public |open |final )*"
    r"(?:case|associatedtype|(?:class |static )?(?:func|var|let)|(?:convenience )?init|subscript)\b"
)


def declarations(text: str) -> Iterator[tuple[str, str]]:
    """Yield the enclosing type's name and the declaration, for every declaration in a stub."""
    scope: list[str] = []
    for line in (line.split("//")[0].strip() for line in text.splitlines()):
        if line.startswith("@available(*, unavailable) extension "):
            yield ".".join(scope), line
        elif (found := TYPE.match(line)) is not None:
            yield ".".join(scope), line
            if not line.endswith("{}"):
                scope.append(found.group(1))
        elif line == "}":
            scope.pop()
        elif MEMBER.match(line):
            yield ".".join(scope), line
        else:
            assert not line or line.startswith("@_exported import"), f"what is '{line}'?"
    assert scope == []


def normal(declaration: str) -> str:
    """Return a declaration, whether a stub's or Apple's, as callers see it.

    Access, bodies, and the isolation that Swift 6.0 can't write are left out. Of a type its conformances are left out,
    unless it is a protocol.
    """
    text = re.sub(r"\b(public|open|final) |@nonexhaustive |nonisolated\(nonsending\) ", "", declaration)
    text = re.sub(r"\s+:", ":", text)
    property_ = re.match(r"(var|let|subscript)\b", text)
    text = text.replace("{ get { fatalError() } set { fatalError() } }", "{ get set }")
    text = text.replace("{ fatalError() }", "{ get }" if property_ else "").strip()
    if property_ and "{" not in text:
        text += " { get }" if text.startswith("let ") else " { get set }"
    text = re.sub(r"^let ", "var ", text)
    if text.startswith("@available"):
        return text.removesuffix("{}").strip()
    if re.match(r"(enum|struct|class|protocol) (?!func)", text):
        text = re.sub(r"\s*\{\}?$", "", text)
        if not text.startswith("protocol "):
            text = text.split(":")[0]
    return text


@pytest.mark.parametrize("module", MODULES)
def test_a_stub_declares_what_apple_declares(module: str) -> None:
    stub = (STUBS / module / f"{module}.swift").read_text(encoding="utf-8")
    declared = [(where, normal(line)) for where, line in declarations(stub)]
    listed = [(entry["in"], normal(entry["apple"])) for entry in ENTRIES if entry["module"] == module]
    assert sorted(declared) == sorted(listed)
    assert len(set(declared)) == len(declared)


def test_every_signature_names_its_page_and_who_read_it() -> None:
    for entry in ENTRIES:
        assert entry["module"] in MODULES
        assert entry["page"].startswith("https://developer.apple.com/documentation/")
        if entry["read"] is None:
            assert entry["source"], entry
        else:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["read"]), entry


def version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


def test_a_stub_is_as_open_and_as_sendable_as_apple_s_interface_says() -> None:
    text = (STUBS / "CoreML" / "CoreML.swift").read_text(encoding="utf-8")
    declared = {(where, normal(line)): line for where, line in declarations(text)}
    known = [entry for entry in ENTRIES if "sendable" in entry]
    assert {entry["sendable"] for entry in known} == {"yes", "unavailable"}
    for entry in known:
        line = declared[entry["in"], normal(entry["apple"])]
        assert (": Sendable" in line or ", Sendable" in line) == (entry["sendable"] == "yes"), line
        assert ("@frozen" in line) == entry.get("frozen", False), line
        name = entry["apple"].split()[-1]
        refused = f"@available(*, unavailable) extension {name}: Sendable {{}}" in text
        assert refused == (entry["sendable"] == "unavailable"), line


def test_what_the_package_uses_is_there_from_its_oldest_systems_on() -> None:
    manifest = (STUBS.parents[1] / "Package.swift").read_text(encoding="utf-8")
    oldest = {name: version(number) for name, number in re.findall(r"\.(macOS|iOS|visionOS)\(\.v(\d+)\)", manifest)}
    known = [entry for entry in ENTRIES if "available" in entry]
    assert set(oldest) == {"macOS", "iOS", "visionOS"} and known
    for entry in known:
        assert entry["interface"], entry
        for system, since in re.findall(r"(\w+) ([\d.]+)", entry["available"]):
            assert version(since) <= (*oldest[system], 0), (entry["apple"], since)


@pytest.mark.parametrize(
    ("edited", "reason"),
    [
        ("open func makeState() throws -> MLState { fatalError() }", "another signature"),
        ("open func resetState() { fatalError() }", "no declaration of Apple's"),
    ],
)
def test_an_edited_stub_is_noticed(edited: str, reason: str) -> None:
    stub = (STUBS / "CoreML" / "CoreML.swift").read_text(encoding="utf-8")
    stub = stub.replace("open func makeState() -> MLState { fatalError() }", edited)
    listed = {(entry["in"], normal(entry["apple"])) for entry in ENTRIES}
    assert {(where, normal(line)) for where, line in declarations(stub)} - listed, reason


def test_apple_s_spelling_is_the_stub_s() -> None:
    assert normal("let a: [String : Int]") == normal("public var a: [String: Int] { fatalError() }")
    assert normal("var a: Int?") == normal("open var a: Int? { get { fatalError() } set { fatalError() } }")
    assert normal("var a: Int { get }") != normal("var a: Int")
    assert normal("final func a()") == normal("public func a() { fatalError() }")
    assert normal("protocol A : Sendable") != normal("public protocol A {")
