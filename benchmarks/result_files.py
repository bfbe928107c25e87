"""What the benchmarks measured: one JSON document each, in a folder that is not under version
control and need not exist.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def write_results(path: Path, document: object) -> None:
    """Write a document, making its folder, and print where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
    print(f"written to {path}")
