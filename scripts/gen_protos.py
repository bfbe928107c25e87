"""Write the Python modules of the files under proto/ with grpcio-tools' compiler; with `--check`
only say which differ, and fail when one does.

Left out is the call that refuses a library which is older than the compiler: nothing here needs one
as new. And so a module does not depend on which compiler wrote it.
"""

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "proto"
# Proto file → the folder of its module, and of the module's types.
FOLDERS = {
    SOURCES / "pointsman/replica/v1/replica.proto": ROOT / "picker/peers/generated",
    SOURCES / "pointsman/parsers/v1/grpc_bodies.proto": ROOT
    / "picker/contrib/grpc_parsers/_generated",
}
SUFFIXES = ("_pb2.py", "_pb2.pyi")
HEAD = "# Written by scripts/gen-protos from {}; edits are lost.\n"
_VERSION = re.compile(
    r"^# Protobuf Python Version.*?\n|^from google.protobuf import runtime_version.*?\n"
    r"|^_runtime_version\.Validate\w+\(\n.*?^\)\n",
    re.MULTILINE | re.DOTALL,
)


def texts_of(source: Path, target: Path) -> dict[Path, str]:
    """The modules of a proto file in `target`. Raises `RuntimeError` when it cannot be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        included = files("grpc_tools") / "_proto"
        paths = [f"-I{SOURCES}", f"-I{included}"]
        outputs = [f"--python_out={folder}", f"--pyi_out={folder}"]
        name = source.relative_to(SOURCES)
        if protoc.main(["protoc", *paths, *outputs, name.as_posix()]) != 0:
            raise RuntimeError(f"{source} cannot be compiled")
        head = HEAD.format(source.relative_to(ROOT).as_posix())
        modules = [name.with_name(name.stem + suffix) for suffix in SUFFIXES]
        return {
            target / one.name: head + _VERSION.sub("", (Path(folder) / one).read_text())
            for one in modules
        }


def different() -> dict[Path, str]:
    """The modules that are missing or not as they would be written, as they should be."""
    wanted: dict[Path, str] = {}
    for source, target in FOLDERS.items():
        wanted |= texts_of(source, target)
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text
    }


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 when a check finds differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files differ")
    changed = different()
    is_check = parser.parse_args(arguments).check
    for module, text in changed.items():
        name = module.relative_to(ROOT).as_posix()
        if is_check:
            print(f"{name} is not what scripts/gen-protos writes", file=sys.stderr)
            continue
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
        print(f"wrote {name}")
    return 1 if is_check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
