"""Lets a server end with the process that started it, however that ends."""

from __future__ import annotations

import os
import signal
import threading


def follow_parent() -> None:
    """Ends this process in order once its standard input closes, as it does when the parent is gone.

    Called in the server's process: bench/server.py names it in the command that starts one.
    """

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
