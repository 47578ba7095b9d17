"""Decides whether an address belongs to this machine, by its meaning and not by its spelling."""

from __future__ import annotations

import ipaddress
import socket

_LOCALHOST = ("localhost", "localhost.")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens at `host`; False for an unknown name."""
    try:
        *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        return False
    return _is_loopback_address(str(address[0]))


def may_be_asked_for(header: str, *names: str) -> bool:
    """Return whether a Host header names this machine: by a loopback address, as localhost, or by one of `names`.

    A hostile web page could make any other name resolve to this machine (DNS rebinding). A missing header is accepted,
    as every browser sends one.
    """
    name = host_name(header)
    return name in ("", *_LOCALHOST, *map(str.lower, names)) or _is_loopback_address(name)


def host_name(header: str) -> str:
    """Return the name in a Host header in lower case, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
