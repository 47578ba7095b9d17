"""What several tests of quantisers share."""

from __future__ import annotations

import pytest

from .cases import Case, write_case


@pytest.fixture(scope="session", params=("phi3", "qwen2", "gemma3_text", "lfm2", "olmo2"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return write_case(request.param, tmp_path_factory.mktemp("tiny"))
