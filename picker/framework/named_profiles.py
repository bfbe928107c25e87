"""The contract of a profile handler that works with profiles of certain names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class NamesProfiles(Protocol):
    """Asks for profiles by name; both mappings are parameter → the profile that it names."""

    @property
    def required_profiles(self) -> Mapping[str, str]:
        """Those without which nothing is scheduled: a configuration has to have them."""
        ...

    @property
    def optional_profiles(self) -> Mapping[str, str]:
        """Those that were named on purpose and without which something is left out."""
        ...
