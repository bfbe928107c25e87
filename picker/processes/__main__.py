"""Runs a serving process; only a picker of several processes starts it."""

from __future__ import annotations

import sys

from picker.processes.child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
