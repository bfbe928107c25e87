"""Write the files under crds/ from the description of the kinds in picker/k8s/objects; with
`--check` only say which differ, and fail when one does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from picker.k8s.objects.definitions import INSTALLED, Definition  # noqa: E402 (wherever we start)

FOLDER = ROOT / "crds"
HEAD = "# Written by scripts/gen-crds from picker/k8s/objects; edits are lost.\n"


class _Dumper(yaml.SafeDumper):
    """Writes what several places share at each of them."""

    def ignore_aliases(self, data: Any) -> bool:
        """No anchors: an API server takes them, people do not."""
        return True


def text_of(definition: Definition) -> str:
    """A definition's file."""
    return HEAD + yaml.dump(definition.document(), Dumper=_Dumper, width=100)


def wanted() -> dict[str, str]:
    """Every file of the folder."""
    return {one.file_name: text_of(one) for one in INSTALLED}


def different() -> list[str]:
    """The names of files that are missing, superfluous, or not as they would be written."""
    files = {path.name: path.read_text() for path in FOLDER.glob("*.yaml")}
    texts = wanted()
    return sorted(name for name in files.keys() | texts if files.get(name) != texts.get(name))


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 when a check finds differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files differ")
    changed = different()
    if parser.parse_args(arguments).check:
        for name in changed:
            print(f"crds/{name} is not what scripts/gen-crds writes", file=sys.stderr)
        return 1 if changed else 0
    texts = wanted()
    FOLDER.mkdir(exist_ok=True)
    for name in changed:
        if name in texts:
            (FOLDER / name).write_text(texts[name])
        else:
            (FOLDER / name).unlink()
        print(f"{'wrote' if name in texts else 'removed'} crds/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
