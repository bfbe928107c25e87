"""The command `pointsman`, also as `python -m pointsman`; everything else is in `fleet.cli`."""

from __future__ import annotations

import sys

from fleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
