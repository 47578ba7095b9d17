"""`shardmill serve` with a fake model, as a process: python -m serve.process DELAY [OPTION ...]."""

from __future__ import annotations

import sys

from shardmill import cli
from shardmill.serve import model as serving

from .fake import Speaker, fake_model

if __name__ == "__main__":
    delay = float(sys.argv.pop(1))
    serving.load_model = lambda *_: fake_model(Speaker(slots=4096, delay=delay))  # type: ignore[assignment]
    sys.argv[1:1] = ["serve", "no-build-needed"]
    cli.main()
