"""Build step: a wheel has one package, `pointsman`, with `base`, `picker`, `worker`, `fleet` in it.

In the repository, in an editable install and in the sources these are packages of their own, so
that imports stay short and no file has to know how it was installed. Names as common as these
may not be at the top level of an installation, where they would meet those of other projects; so
what setuptools has collected for a wheel is moved into `pointsman`, and every name of one of our
modules in it gets the new prefix: in import statements, and in strings that are such a name and
nothing else (for `import_module`, `python -m`, `importlib.resources`). Names are found in the
syntax tree, and nothing but them changes in a file, so line numbers are those of the repository.
"""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build import build
from setuptools.command.egg_info import egg_info

ROOT = "pointsman"
PARTS = ("base", "picker", "worker", "fleet")
DEPLOYED = ("envoy", "grafana", "prometheus", "systemd")  # as in fleet/commands/files.py
_NAME = re.compile(rf"(?:{'|'.join(PARTS)})(?:\.\w+)+")
_LINK = re.compile(r"\]\((?P<path>(?!https?://|#|mailto:)[^)\s]+)\)")
_FROM = re.compile(rb"from\s+(?=\w)")


class BuildOnePackage(build):  # type: ignore[misc]
    """setuptools' `build`, whose result then moves; an editable install does not come by here."""

    def run(self) -> None:
        """Build into a folder that has nothing of earlier builds, and move it."""
        folder = Path(self.build_lib)
        shutil.rmtree(folder, ignore_errors=True)
        super().run()
        move(folder)
        copy_deploy(Path(__file__).parents[1] / "deploy", folder)


class DescribeOnePackage(egg_info):  # type: ignore[misc]
    """setuptools' `egg_info`, which writes the metadata before anything has moved. README leads to
    the repository there, since a package index has none of its files.
    """

    def run(self) -> None:
        """Write them, README with absolute links."""
        metadata = self.distribution.metadata
        repository = metadata.project_urls["Repository"]
        metadata.long_description = absolute(metadata.long_description, repository)
        super().run()

    def write_file(self, what: str, filename: str, data: str) -> None:
        """Write one of its files; that of top-level names has only ours."""
        super().write_file(what, filename, f"{ROOT}\n" if what == "top-level names" else data)


def absolute(text: str, repository: str) -> str:
    """A page of the repository with its relative links made absolute, those of pictures to the
    files themselves; done twice it is the same.
    """

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found["path"].endswith((".png", ".svg")) else "blob"
        return f"]({repository}/{kind}/main/{found['path']})"

    return _LINK.sub(link, text)


def move(folder: Path) -> None:
    """Move the packages of `folder` into its package `pointsman`, and rewrite their imports.

    Raises `SyntaxError` for an import that cannot have the prefix: `import worker.x`, which binds
    the name `worker`.
    """
    modules = frozenset(_modules(folder))
    for name in PARTS:
        (folder / name).rename(folder / ROOT / name)
    for path in (folder / ROOT).rglob("*.py"):
        before = path.read_bytes()
        after = rewritten(before, modules, str(path.relative_to(folder)))
        if after != before:
            path.write_bytes(after)


def copy_deploy(source: Path, folder: Path) -> None:
    """Copy what `pointsman files` writes into the package of `folder`."""
    for name in DEPLOYED:
        shutil.copytree(source / name, folder / ROOT / "fleet" / "deploy" / name)


def rewritten(source: bytes, modules: frozenset[str], name: str) -> bytes:
    """The text of a module with the prefix before every one of `modules`; see `move`."""
    lines = source.splitlines(keepends=True)
    places = sorted(_places(ast.parse(source, name), lines, modules, name), reverse=True)
    for row, column in places:  # from the end: a change moves what is behind it
        line = lines[row - 1]
        lines[row - 1] = line[:column] + ROOT.encode() + b"." + line[column:]
    return b"".join(lines)


def _places(
    tree: ast.AST, lines: list[bytes], modules: frozenset[str], name: str
) -> Iterator[tuple[int, int]]:
    """The positions of the prefix: line, counted from 1, and byte in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if not node.level and node.module is not None and _is_ours(node.module):
                start = _FROM.match(lines[node.lineno - 1], node.col_offset)
                if start is None:
                    raise _unsupported(node, name)
                yield node.lineno, start.end()
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    if alias.asname is None:
                        raise _unsupported(node, name)
                    yield alias.lineno, alias.col_offset
        elif isinstance(node, ast.Constant) and node.value in modules:
            literal = lines[node.lineno - 1][node.col_offset :]
            quote = 3 if literal[:3] in (b'"""', b"'''") else 1
            yield node.lineno, node.col_offset + quote


def _unsupported(node: ast.Import | ast.ImportFrom, name: str) -> SyntaxError:
    return SyntaxError(f"{name}:{node.lineno}: write `from … import …`: this import cannot move")


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PARTS


def _modules(folder: Path) -> Iterator[str]:
    """The dotted names of the modules below the packages; not of the packages themselves, which
    are also words.
    """
    for part in PARTS:
        for path in (folder / part).rglob("*"):
            if path.suffix == ".py" or path.is_dir():
                dotted = ".".join(path.relative_to(folder).with_suffix("").parts)
                if _NAME.fullmatch(dotted) and path.name != "__init__.py":
                    yield dotted
