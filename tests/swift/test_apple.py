"""What check_apple.py makes of conditions, so that each platform's branches, and no other, meet the compiler."""

import pytest

from .programs import ROOT, script

apple = script("check_apple")


@pytest.mark.parametrize(
    ("condition", "platforms"),
    [
        ("os(iOS)", {"ios", "catalyst"}),
        ("os(iOS) || os(visionOS)", {"ios", "catalyst", "visionos"}),
        ("arch(x86_64) && (os(macOS) || targetEnvironment(macCatalyst))", {"catalyst"}),
        ("os(macOS) && arch(x86_64)", set()),
        ("!canImport(ObjectiveC)", set()),
        ("os(Linux) || canImport(FoundationModels, _version: 2)", {"ios", "macos", "catalyst", "visionos"}),
        ("canImport(Glibc)", set()),
    ],
)
def test_a_condition_holds_on_these_platforms(condition: str, platforms: set[str]) -> None:
    assert {name for name, platform in apple.PLATFORMS.items() if apple.holds(condition, platform)} == platforms


@pytest.mark.parametrize("condition", ["DEBUG", "swift(>=6)", "os(iOS) && Transformers"])
def test_a_condition_of_another_kind_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match="can't resolve"):
        apple.holds(condition, apple.PLATFORMS["ios"])


def test_what_is_left_out_is_blank_and_lines_keep_their_numbers() -> None:
    text = "a\n#if os(macOS)\nb\n#if os(iOS)\nc\n#endif\n#elseif os(iOS)  // not here\nd\n#else\ne\n#endif\nf\n"
    assert apple.resolved(text, apple.PLATFORMS["macos"]).split("\n") == ["a", "", "b", *[""] * 8, "f", ""]
    assert apple.resolved(text, apple.PLATFORMS["ios"]).split("\n") == ["a", *[""] * 6, "d", "", "", "", "f", ""]
    assert apple.resolved(text, apple.PLATFORMS["visionos"]).split("\n") == ["a", *[""] * 8, "e", "", "f", ""]


def test_every_module_of_the_package_is_checked() -> None:
    folders = {str(folder.relative_to(ROOT)) for folder in (ROOT / "swift" / "Sources").iterdir()}
    assert set(apple.PACKAGE.values()) == folders


def test_every_condition_of_the_sources_can_be_resolved() -> None:
    for file in (ROOT / "swift" / "Sources").rglob("*.swift"):
        for platform in apple.PLATFORMS.values():
            apple.resolved(file.read_text(encoding="utf-8"), platform)
