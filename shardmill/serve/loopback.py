"""Tells whether an address belongs to this machine, by what it means and not by how it is written."""

from __future__ import annotations

import ipaddress
import socket

_LOCALHOST = ("localhost", "localhost.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at `host`; False for an unknown name."""
    try:
        *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        return False
    return _is_loopback_address(str(address[0]))


def may_be_asked_for(header: str, host: str) -> bool:
    """Whether a Host header names this machine, given that the server listens at `host`.

    Only localhost and the server's own name are accepted as names: a web page that wants to reach this machine could
    make any other name resolve to it. A missing header is accepted, as no browser leaves it out.
    """
    name = _name(header)
    return name in ("", *_LOCALHOST, host.lower()) or _is_loopback_address(name)


def _name(header: str) -> str:
    """The name in a Host header, without port and brackets."""
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
