"""Marks what is judged by a derived limit."""

from __future__ import annotations

import limits
import pytest


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and limits.judges(item.function):
            item.add_marker(pytest.mark.numeric)
