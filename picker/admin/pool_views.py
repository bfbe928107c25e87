"""What a picker of several pools says of them: the shape of `/pools`."""

from __future__ import annotations

from typing import Final

import msgspec

LIST: Final = "/pools"
PREFIX: Final = "/pools/"


class PoolView(msgspec.Struct, frozen=True):
    """One pool: what it is called, where more is told of it, and how it is."""

    name: str
    path: str
    ready: bool
    endpoints: int = 0
    inflight_requests: int = 0
    problem: str | None = None


class PoolsView(msgspec.Struct, frozen=True):
    """All of them."""

    pools: tuple[PoolView, ...]
