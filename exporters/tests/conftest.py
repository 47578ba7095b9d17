"""Marks what is judged by a derived limit."""

from limits import pytest_collection_modifyitems as pytest_collection_modifyitems
