"""Pickers of several pools: each pool has an address of its own, which commands have to name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fleet.errors import FleetError
from picker.admin.views import LIST, PREFIX, PoolsView


class SeveralPoolsError(FleetError): ...


@dataclass(frozen=True, slots=True)
class PoolAddress:
    name: str
    url: str


def list_of(url: str) -> str:
    return _root(url) + LIST


def is_of_all(url: str) -> bool:
    return url == _root(url)


def pools_of(url: str, content: bytes) -> tuple[PoolAddress, ...]:
    try:
        view = msgspec.json.decode(content, type=PoolsView)
    except msgspec.MsgspecError:
        return ()
    root = _root(url)
    return tuple(PoolAddress(one.name, root + one.path.rstrip("/")) for one in view.pools)


def which_to_name(url: str, pools: Sequence[PoolAddress]) -> str | None:
    """Return a message that one of `pools` has to be named, unless `url` names one."""
    if not pools or url in {one.url for one in pools}:
        return None
    wrong = "it serves several pools" if is_of_all(url) else "it serves no such pool"
    return f"{wrong}; name one of them: {', '.join(f'--picker {one.url}' for one in pools)}"


def refuse_several(url: str, ask: Callable[[str], bytes | None]) -> None:
    """Raise `SeveralPoolsError` if `url` names none of the pools that `ask` returns."""
    content = ask(list_of(url))
    problem = which_to_name(url, pools_of(url, content or b""))
    if problem is not None:
        raise SeveralPoolsError(f"{url}: {problem}")


def _root(url: str) -> str:
    return f"{url}/".partition(PREFIX)[0].rstrip("/")
