"""Pickers of several pools: each pool has an address of its own, which commands have to name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fleet.errors import FleetError
from picker.admin.views import LIST, PREFIX, PoolsView


class SeveralPoolsError(FleetError):
    """The address is that of a picker of several pools, and of none of them."""


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """One pool, and where it is asked."""

    name: str
    url: str


def list_of(url: str) -> str:
    """Where the picker says which pools it has, `url` being its own address or that of a pool."""
    return _root(url) + LIST


def is_of_all(url: str) -> bool:
    """Whether `url` names no pool."""
    return url == _root(url)


def pools_of(url: str, content: bytes) -> tuple[PoolAddress, ...]:
    """What `list_of(url)` answered; none where that is not such a list."""
    try:
        view = msgspec.json.decode(content, type=PoolsView)
    except msgspec.MsgspecError:
        return ()
    root = _root(url)
    return tuple(PoolAddress(one.name, root + one.path.rstrip("/")) for one in view.pools)


def which_to_name(url: str, pools: Sequence[PoolAddress]) -> str | None:
    """That one of `pools` has to be asked, if `url` is none of them."""
    if not pools or url in {one.url for one in pools}:
        return None
    wrong = "it serves several pools" if is_of_all(url) else "it serves no such pool"
    return f"{wrong}; name one of them: {', '.join(f'--picker {one.url}' for one in pools)}"


def refuse_several(url: str, ask: Callable[[str], bytes | None]) -> None:
    """Raise `SeveralPoolsError` where `url` is of a picker of several pools, and of none of them.

    `ask` answers what is at an address, None where there is nothing.
    """
    content = ask(list_of(url))
    problem = which_to_name(url, pools_of(url, content or b""))
    if problem is not None:
        raise SeveralPoolsError(f"{url}: {problem}")


def _root(url: str) -> str:
    """Without what names a pool, and without a slash at the end."""
    return f"{url}/".partition(PREFIX)[0].rstrip("/")
