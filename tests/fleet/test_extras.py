"""An extra brings the packages that its programs import."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROGRAM = """
import sys
before = set(sys.modules)
import json, worker.app, worker.engine.process
print(json.dumps(sorted({name.partition(".")[0] for name in {*sys.modules} - before})))
"""


def closure(*roots: str) -> set[str]:
    found: set[str] = set()
    seen: set[str] = set()
    left = list(roots)
    while left:
        text = left.pop()
        if text in seen:
            continue
        seen.add(text)
        wanted = Requirement(text)
        found.add(canonicalize_name(wanted.name))
        try:
            own = requires(wanted.name) or []
        except PackageNotFoundError:
            continue
        for line in own:
            marker = Requirement(line).marker
            extras = wanted.extras or {""}
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                left.append(line)
    return found


def test_simulated_workers_import_what_their_extra_brings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    homes = packages_distributions()
    brought = closure("pointsman[sim]")
    strangers = {
        name: homes[name]
        for name in json.loads(done.stdout)
        if name in homes and not any(canonicalize_name(home) in brought for home in homes[name])
    }
    assert "msgspec" in json.loads(done.stdout)
    strangers.pop("sniffio", None)  # anyio imports it if it is installed
    assert not strangers
