"""Run every file of tests/fuzz for a minute (`make fuzz`), as many at a time as there are cores.

    python scripts/fuzz.py [SECONDS] [SEED]

Without a seed each run begins elsewhere; the seed is printed, and repeats the run. The exit status
is 1 when anything was found.
"""

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tests" / "fuzz"


def run(path: Path, seconds: str, seed: str) -> bool:
    """Fuzz one area; whether nothing was found."""
    environment = {**os.environ, "POINTSMAN_FUZZ_SECONDS": seconds, "POINTSMAN_FUZZ_SEED": seed}
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(path),
        "--timeout",
        "900",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found_nothing = done.returncode == 0
    print(f"{'ok    ' if found_nothing else 'FAILED'} {path.name}", flush=True)
    if not found_nothing:
        print(done.stdout[-20_000:], done.stderr[-5_000:], flush=True)
    return found_nothing


def main() -> int:
    """Run every fuzz file for the given time."""
    seconds = sys.argv[1] if len(sys.argv) > 1 else "60"
    seed = sys.argv[2] if len(sys.argv) > 2 else str(random.randrange(10_000))
    paths = sorted(FOLDER.glob("test_*.py"))
    print(f"fuzzing {len(paths)} areas for {seconds} s each, seed {seed}", flush=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(lambda path: run(path, seconds, seed), paths))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
