"""The command `pointsman`, also as `python -m pointsman`; see `fleet.commands.cli`."""

import sys

from fleet.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
