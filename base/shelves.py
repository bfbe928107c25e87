"""Load an optional part of a program by name, so that no import binds the core to it."""

from importlib import import_module
from types import ModuleType


def load_shelf(name: str) -> ModuleType | None:
    """Import the module `name` of a shelf; return None if there is none. Raises
    `ModuleNotFoundError` if only a package that the module needs is missing.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # Missing is the shelf or a parent of it; any other name is a package that it needs.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None
