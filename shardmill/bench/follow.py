"""Lets a server end with the process that started it, even if that process is killed."""

from __future__ import annotations

import os
import signal
import threading


def follow_parent() -> None:
    """End this process in order when its standard input closes, as it does when the parent is gone.

    It is called in the server's process: bench/server.py names it in the command that starts one.
    """

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
