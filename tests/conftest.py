"""Fixtures that several folders of tests share: one small model, built once per session."""

from __future__ import annotations

import gc

gc.disable()  # until all is collected: whatever is imported stays, and looking through it takes a third of that time

import copy
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import checked
import huggingface_hub
import hypothesis
import limits
import portable_coreml
import pytest
import shared
import tiny
import torch
from patience import PATIENCE
from processes import told
from stored import Outcome

from shardmill.machine import collect_rarely
from shardmill.pipeline.cache import remote
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.steps import provenance

if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores, and so do the processes that they start
    torch.set_num_threads(1)

# As in the background of a script: what tests start would inherit it, and no Ctrl-C would end that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop(remote.URL, None)  # no test sends what it makes to the store of whoever runs it


# By day the same examples are drawn each time, nightly others, and how to draw them again is said. A busy machine fails
# no test: an example may take any time, and so may drawing it. A test's examples share its fixtures, and expect it.
DRAWING = hypothesis.settings(
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.register_profile("fast", DRAWING, derandomize=True, database=None)
hypothesis.settings.register_profile("slow", DRAWING, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for what may be tried for longer, or larger."""
    parser.addoption("--kills", type=int, default=4, help="random points at which tests/faults kills a build")
    parser.addoption("--demo", action="store_true", help="build the demo too, where builds are compared byte by byte")
    parser.addoption("--requests", type=int, default=300, help="requests that are drawn for the server")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how examples are drawn, before any test is imported."""
    hypothesis.settings.load_profile("slow" if "drawn" in config.option.markexpr else "fast")


def pytest_unconfigure() -> None:
    """Nothing is left of what tests shared."""
    shared.remove()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take a `compared_model` build a tiny one, and the demo with --demo."""
    if "compared_model" in metafunc.fixturenames:
        metafunc.parametrize("compared_model", ["tiny", *(["demo"] if metafunc.config.getoption("demo") else [])])


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what hypothesis draws and what is judged by a derived limit.

    A test marked as thorough loses the mark for the parameters that stay in the README's lane. The files that take
    longest come first, or one worker would end long after the others.
    """
    limits.pytest_collection_modifyitems(items)
    for item in items:
        thorough = item.get_closest_marker("thorough")
        stays = thorough.kwargs.get("but", ()) if thorough else ()
        if stays and item.callspec.id in stays:
            item.own_markers.remove(thorough)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.drawn)
    items.sort(key=lambda item: item.get_closest_marker("pipeline") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Tell of a process that failed while a fixture was made."""
    with told():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Tell of a process that failed in a test."""
    with told():
        return (yield)


def pytest_collection_finish() -> None:
    """What all tests import stays: to look through it, as coremltools does at each conversion, takes a second."""
    collect_rarely()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Keep the garbage collector from what earlier files left, which each conversion of coremltools would search."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests bring a hub of their own, whatever this shell says of the real one."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "CI", "SHARDMILL_LOCKED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", str(int(PATIENCE)))  # its first answer, too, may take any time
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="session", autouse=True)
def packages_read_once() -> Iterator[None]:
    """What the installed packages are takes most of the time in which a finished build is attested."""
    with pytest.MonkeyPatch.context() as patch:
        known = functools.cache(provenance.package_descriptors)
        patch.setattr(provenance, "package_descriptors", lambda deciding: copy.deepcopy(known(frozenset(deciding))))
        yield


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """The tied checkpoint in three layers parts and two head slices."""
    return tiny.build(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied(built: tiny.Build, tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """The same layers under an LM head of its own."""
    known = {part.name: built.packages[part.name] for part in built.layers()}
    return tiny.build(tmp_path_factory.mktemp("untied"), tied=False, known=known)


@pytest.fixture(scope="session")
def checkable(built: tiny.Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build of the same model that carries what its programs must give, for those who check it."""
    return checked.finished(built, tmp_path_factory.mktemp("sound"))


@pytest.fixture
def fp32() -> Iterator[None]:
    """The portable engine in fp32, where this is no Mac."""
    portable_coreml.install(precision="fp32")
    yield


@pytest.fixture
def shop(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def here(tmp_path: Path) -> Outcome:
    """A build that uses it."""
    return Outcome(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Outcome:
    """Another one."""
    return Outcome(tmp_path / "there")
