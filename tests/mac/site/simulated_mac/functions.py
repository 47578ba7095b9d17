"""Functions and constants that macOS lacks are removed; units and a few others are a Mac's."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Callable
from importlib import import_module
from typing import Any

# In this order: socket imports what asks for epoll.
MISSING = {
    "os": (
        "O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_TMPFILE copy_file_range eventfd fdatasync getrandom getresgid"
        " getresuid getxattr listxattr memfd_create pidfd_open posix_fadvise posix_fallocate removexattr"
        " sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setparam"
        " sched_setscheduler setresgid setresuid setxattr splice unshare setns"
    ),
    "resource": "prlimit RUSAGE_THREAD RLIMIT_OFILE RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME",
    "select": "epoll EPOLLIN",
    "signal": "sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL SIGCLD",
    "time": "CLOCK_BOOTTIME CLOCK_TAI",
    "socket": "AF_NETLINK AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED TCP_USER_TIMEOUT",
}
F_FULLFSYNC = 51
KIBIBYTE = 1024


def change() -> None:
    """Change the modules of this process."""
    for name, missing in MISSING.items():
        module = import_module(name)
        for function in missing.split():
            if hasattr(module, function):
                delattr(module, function)
    os.sysconf_names = {n: k for n, k in os.sysconf_names.items() if n != "SC_AVPHYS_PAGES"}
    os.sysconf = _known_sysconf(os.sysconf)
    resource.getrusage = _in_bytes(resource.getrusage)
    resource.setrlimit = _unlimited(resource.setrlimit)
    fcntl.F_FULLFSYNC = F_FULLFSYNC  # type: ignore[attr-defined]
    fcntl.fcntl = _flushing(fcntl.fcntl)


def _known_sysconf(real: Callable[[Any], int]) -> Callable[[Any], int]:
    def sysconf(name: str | int) -> int:
        if isinstance(name, str) and name not in os.sysconf_names:
            raise ValueError("unrecognized configuration name")
        return real(name)

    return sysconf


def _in_bytes(real: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return getrusage with ru_maxrss in bytes, as on macOS, in place of KiB."""

    def getrusage(who: int) -> Any:
        found = list(real(who))
        found[2] *= KIBIBYTE
        return resource.struct_rusage(found)

    return getrusage


def _unlimited(real: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return setrlimit that takes a limit of the address space and does not enforce it, as on macOS."""

    def setrlimit(which: int, limits: Any) -> None:
        if which not in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            real(which, limits)

    return setrlimit


def _flushing(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return fcntl whose F_FULLFSYNC does what fsync does."""

    def control(file: Any, command: int, *rest: Any) -> Any:
        if command != F_FULLFSYNC:
            return real(file, command, *rest)
        os.fsync(file)
        return 0

    return control
