"""The socket that a server listens on. It imports nothing large, so that an address in use is told at once."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardmill.errors import ShardmillError

UNIX = "unix:"  # begins the address of a socket that is a file
_GIVEN = 3  # the first descriptor that systemd passes on, see sd_listen_fds(3)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens at `host`; False for an unknown name."""
    try:
        *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        return False
    return is_loopback_address(str(address[0]))


def is_loopback_address(text: str) -> bool:
    """Return whether a text is an address that only this machine can reach."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


@contextmanager
def listening(host: str, port: int, file: Path | None) -> Iterator[socket.socket]:
    """Give the socket that systemd has passed on, or bind one; at the end it is closed, and a file of ours removed.

    Args:
        host: the address, unless there is a file.
        port: 0 lets the system choose one.
        file: a socket that only this user may connect to.

    Raises:
        ShardmillError: the address can't be used, or systemd passes on several sockets.
    """
    passed_on = _given()
    listener = passed_on or (bind(host, port) if file is None else _bind_file(file))
    try:
        with listener:
            yield listener
    finally:
        if file is not None and passed_on is None:
            file.unlink(missing_ok=True)


def host_of(listener: socket.socket, host: str) -> str:
    """Return where a socket listens: its file after `unix:`, the address that systemd chose, or else `host`."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{name}"
    return host if listener.fileno() != _GIVEN else str(name[0])


def _given() -> socket.socket | None:
    """Return the socket that systemd has passed on to this process; None if it has passed on none."""
    count, process = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID"))  # not for our own processes
    if process != str(os.getpid()):
        return None
    if count != "1":
        raise ShardmillError(f"systemd passes on {count or 'no'} sockets: give the socket's unit one ListenStream")
    listener = socket.socket(fileno=_GIVEN)
    listener.set_inheritable(False)
    return listener


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address; it does not listen yet. Raises ShardmillError if the address can't be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ShardmillError(f"can't listen at {host}:{port}: {why}; choose another --host or --port") from error
    return listener


def _bind_file(file: Path) -> socket.socket:
    """Bind a socket to a file, which this user alone may write to; a file that an ended server left is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if file.exists() and stat.S_ISSOCK(file.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, suppress(ConnectionRefusedError):
                other.connect(str(file))
                raise OSError(None, "another server listens there")
            file.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(file))
        finally:
            os.umask(before)
    except OSError as error:
        listener.close()
        raise ShardmillError(f"can't listen at {file}: {error.strerror or error}; choose another --socket") from error
    return listener
