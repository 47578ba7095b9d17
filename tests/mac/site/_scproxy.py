"""The module that urllib asks for the system's proxies on macOS: there are none."""

from __future__ import annotations


def _get_proxy_settings() -> dict[str, object]:
    return {}


def _get_proxies() -> dict[str, str]:
    return {}
