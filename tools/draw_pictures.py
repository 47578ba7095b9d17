"""Draw README's pictures of a build: the page to try it on, and its report.

    python tools/draw_pictures.py build/demo [--text TEXT] [--out docs/pictures]

Serves the build, lets it continue a text in a headless Chromium, and photographs that and report.html, light and dark.
Nothing on the pictures is made up: the speed is this machine's. It needs Chromium and the extra `test`.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import CONTROL, Page, browser  # noqa: E402  # of the tests, which drive it too

TEXT = 'def read(path):\n    """Return the'
SIZE = (860, 560)  # of a window, in pixels
COLOURS = 48  # of a picture, which keep it small


def main() -> int:
    """Draw the pictures. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a finished build without a chat template")
    parser.add_argument("--text", default=TEXT, help="the text that the model continues")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures", help="the pictures' folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    main = "from shardmill.cli import main; main()"
    command = [sys.executable, "-c", main, "serve", str(args.build), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with server, tempfile.TemporaryDirectory() as folder:
        assert server.stdout is not None
        try:
            said = server.stdout.readline() + server.stdout.readline()
            address = re.search(r"http://\S+/$", said)
            if address is None:
                return 1  # it has said why
            with browser(Path(folder)) as page:
                continued(page, address[0], args.text)
                for name, place in (("page", None), ("report", (args.build / "report.html").resolve().as_uri())):
                    if place:
                        page.open(place)
                    for scheme in ("light", "dark"):
                        page.resize(*SIZE, dark=scheme == "dark")
                        save(page, args.out / f"{name}-{scheme}.png")
        finally:
            server.terminate()
    return 0


def continued(page: Page, address: str, text: str) -> None:
    """Open a server's page, and wait until the model has continued a text on it."""
    page.resize(*SIZE)
    page.open(address)
    page.wait("!document.querySelector('#ask').hidden")
    page.type(text)
    page.press("Enter", CONTROL)
    page.wait("document.querySelector('.took')")


def save(page: Page, file: Path) -> None:
    """Write what a window shows as a small PNG."""
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"wrote {file}, {file.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
