"""What `verify`, `pull` and `publish` refuse although every record of it agrees with every other one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline import made
from pipeline.made_forms import FORMS

from shardmill.checkpoint.cache import HashCache
from shardmill.errors import ShardmillError
from shardmill.pipeline.steps import provenance
from shardmill.release.publish import PublishOptions, prepare_upload
from shardmill.release.pull import Address, _believe
from shardmill.release.verify import prove

from .forgeries import FORGERIES, Forgery, forge
from .signed import Keys, make_keys

ONE = {"name": "numpy", "uri": "pkg:pypi/numpy@2.4.6"}


@pytest.fixture(scope="module", autouse=True)
def without_packages() -> Iterator[None]:
    """Nothing here is about the installed packages, whose metadata takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "package_descriptors", lambda deciding: [ONE])
        yield


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A true build of each form, by its name."""
    folder = tmp_path_factory.mktemp("true")
    for name, form in FORMS.items():
        made.whole(folder / name, form)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_a_true_build_of_each_form_is_accepted(builds: Path, form: str) -> None:
    assert prove(builds / form / "tiny", []).wrong == ()


# The same rule is broken in another part, number or direction.
ALIKE = {
    "decoder without residency/layers_00_02",
    "decoder without residency/head_0",
    "decoder without parity/layers_00_02",
    "decoder without parity/head_0",
    "experts without residency/experts_00_1",
    "adapted without parity/labels",
    "drafting without parity/draft_head",
    "parity/layers_00_01 without experts_agreement",
    "parity/layers_00_02 without adapter_error: T=1",
    "kl of parity/stack not run",
    "program_error of parity/layers_00_02 not run",
    "kl of decoder 1.0",
    "top1_agreement of decoder 0.5",
    "weight_steps of decoder 1.0",
    "kl of decoder -inf",
    "experts_agreement_fp16 of experts 0.1",
    "label_mismatches of encoder 2",
    "psnr -50.0 >= -1e9 False",
    "psnr -50.0 <= 30 True",
    "program_error 0.5 >= 0 False",
    "perplexity_ratio 8.0 <= 9 True",
    "kl 0.001 <= 5 False",
    "decoder parity/stack by {'limits': '6 bits'}",
}


@pytest.mark.thorough(but=[forgery.name for forgery in FORGERIES if forgery.name not in ALIKE])
@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_a_forged_build_is_refused(builds: Path, tmp_path: Path, forgery: Forgery) -> None:
    """By the rule that it breaks, and by no other."""
    keys = make_keys(tmp_path, "forger")
    build = copied(builds / forgery.form / "tiny", tmp_path / "tiny")
    forge(forgery, build, keys.private)
    found = prove(build, [keys.known])
    file, told = forgery.told
    assert {name for name, _ in found.wrong} == {file}, found.wrong
    assert all(told in line for _, line in found.wrong), found.wrong
    assert found.audit.wrong == ()


def test_what_is_left_out_by_day_is_a_forgery() -> None:
    assert {forgery.name for forgery in FORGERIES} > ALIKE


def test_no_forgery_is_published_or_pulled(builds: Path, tmp_path: Path, keys: Keys) -> None:
    of_the_stack = [one for one in FORGERIES if one.told[0] == "parity/stack.json"]
    for number, forgery in enumerate(of_the_stack[:3]):
        build = copied(builds / forgery.form / "tiny", tmp_path / str(number) / "tiny")
        forge(forgery, build, keys.private)
        with pytest.raises(ShardmillError, match=r"parity/stack\.json: .* build again before you publish"):
            prepare_upload(build, PublishOptions("acme/tiny", license="mit"))
        with pytest.raises(ShardmillError, match=r"acme/tiny@1: parity/stack\.json: .*; pull another revision"):
            _believe(build, [keys.known], Address("acme/tiny", None), "1", HashCache(tmp_path / "hashes"))


def copied(build: Path, to: Path) -> Path:
    """A build that may be changed: its files are its own, though the true one's are links into a store."""
    shutil.copytree(build, to)
    for path in to.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to
