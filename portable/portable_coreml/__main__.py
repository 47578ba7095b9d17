"""`python -m portable_coreml` is `portable-coreml`."""

import sys

from portable_coreml.cli import main

if __name__ == "__main__":
    sys.exit(main())
