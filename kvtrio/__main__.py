"""``python -m kvtrio``."""

import sys

from kvtrio.cli import main

if __name__ == "__main__":
    sys.exit(main())
