"""A whole picker of several pools, with a view of each pool as a picker of its own."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc

from picker.app.picker import Picker
from picker.cli.options import Options, PoolFlags, Ports
from tests.support.picker.ext_proc_stream import completion
from tests.support.picker.metrics_pages import Pod, serving
from tests.support.picker.whole_picker import (
    FOUR_SCORERS,
    LOOPBACK,
    MAX_MESSAGE,
    PolicyObject,
    WholePicker,
    started_picker,
    write_endpoints,
)
from tests.support.waiting import until

POOL = "x-pointsman-pool"


class NamingChannel:
    def __init__(self, channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> None:
        self._channel, self._metadata = channel, metadata

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.stream_stream(*args, **kwargs), metadata=self._metadata)


@dataclass
class SeveralPools:
    """`common` uses the common port without the name of a pool."""

    picker: Picker
    ports: Ports
    common: WholePicker
    pools: Mapping[str, WholePicker]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.metrics}"

    async def ask(self, key: str, request_id: str) -> str:
        async with self.at_its_port(key) as pool:
            return await pool.destination(completion(), {"x-request-id": request_id})

    def __getitem__(self, key: str) -> WholePicker:
        return self.pools[key]

    @asynccontextmanager
    async def at_its_port(self, key: str, *names: str) -> AsyncIterator[WholePicker]:
        address = f"127.0.0.1:{self.ports.pools[key]}"
        async with grpc.aio.insecure_channel(address, options=MAX_MESSAGE) as channel:
            metadata = [(POOL, name) for name in names]
            yield replace(self[key], channel=_named(channel, *metadata))


def _named(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> grpc.aio.Channel:
    return cast("grpc.aio.Channel", NamingChannel(channel, *metadata))


def of_pool(name: str, policy: PolicyObject) -> PolicyObject:
    changed = deepcopy(policy)
    changed["spec"]["poolRef"]["name"] = name
    return changed


def file_of(folder: Path, key: str) -> Path:
    return folder / f"{key.replace('/', '_')}.yaml"


def pool_flags(key: str, **more: Any) -> PoolFlags:
    namespace, _, name = key.rpartition("/")
    given = {"namespace": namespace or "default", "grpc_port": 0} | more
    return PoolFlags(name, **given)


@asynccontextmanager
async def several_pools(
    folder: Path,
    pools: Mapping[str, Sequence[Pod]],
    config: str | None = FOUR_SCORERS,
    *,
    configs: Mapping[str, Path] | None = None,
    policies: Mapping[str, Sequence[PolicyObject]] | None = None,
    serves: bool = True,
    **changes: Any,
) -> AsyncIterator[SeveralPools]:
    flags = []
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 (it takes no time)
    async with AsyncExitStack() as stack:
        every = {id(pod): pod for some in pools.values() for pod in some}
        for pod in every.values() if serves else ():
            await stack.enter_async_context(serving(pod))
        for key, some in pools.items():
            path = file_of(folder, key)
            write_endpoints(path, some, (policies or {}).get(key, ()))
            own = (configs or {}).get(key)
            flags.append(pool_flags(key, endpoints_file=path, config_file=own))
        given = {"pools": tuple(flags), "config_text": config} | changes
        scene = await stack.enter_async_context(pools_picker(folder, given, pools))
        for key, one in scene.pools.items():
            one.policies = (policies or {}).get(key, ())
            await until(one.has_read_pages)
        yield scene


@asynccontextmanager
async def pools_picker(
    folder: Path, changes: Mapping[str, Any], pods: Mapping[str, Sequence[Pod]] | None = None
) -> AsyncIterator[SeveralPools]:
    options = LOOPBACK | {"allow_experimental_plugins": True}
    async with (
        started_picker(Options(**options | changes)) as (picker, ports),
        grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}", options=MAX_MESSAGE) as channel,
        aiohttp.ClientSession() as http,
    ):
        common = WholePicker(picker, ports, (), folder, channel, http)
        views = {
            key: WholePicker(
                picker,
                ports,
                (pods or {}).get(key, ()),
                file_of(folder, key),
                _named(channel, (POOL, key)),
                http,
                key=key,
            )
            for key in picker.pools
        }
        yield SeveralPools(picker, ports, common, views)
