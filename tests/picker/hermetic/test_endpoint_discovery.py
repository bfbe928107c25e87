"""A client of gRPC follows the endpoints of a whole picker, of one process and of several."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.discovery.v3 import discovery_pb2
from metrics_pages import load_page, pods
from waiting import until
from whole_picker import WholePicker, whole_picker
from xds_call import assignments

from picker.app.picker import StartError
from picker.cli.options import XdsFlags
from picker.xds import wire


@asynccontextmanager
async def following(picker: WholePicker) -> AsyncIterator[Any]:
    """A stream of the endpoints of the pool `p`."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.ports.xds}") as channel:
        call = channel.stream_stream(
            wire.STREAM_ENDPOINTS,
            request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
        )()
        await call.write(discovery_pb2.DiscoveryRequest(resource_names=["p"]))
        yield call
        call.cancel()


async def told(call: Any) -> list[str]:
    """The endpoints of the next response, which is taken over."""
    response = await call.read()
    request = discovery_pb2.DiscoveryRequest(
        resource_names=["p"], version_info=response.version_info, response_nonce=response.nonce
    )
    await call.write(request)
    return assignments(response)["p"]


async def test_a_client_is_sent_every_change_of_the_endpoints(tmp_path: Path) -> None:
    """The page counts it."""
    one, two = pods(load_page(), load_page())
    xds = XdsFlags(0, cluster_name="p")
    async with whole_picker(tmp_path, [one, two], xds=xds) as picker, following(picker) as call:
        assert sorted(await told(call)) == sorted([one.host_port, two.host_port])
        picker.list_endpoints([two])
        assert await told(call) == [two.host_port]
        picker.list_endpoints([])
        assert await told(call) == []
        await until(
            lambda: picker.series("pointsman_xds_acks_total", variant="sotw"),
            lambda found: found == 3,
        )
        assert await picker.series("pointsman_xds_clients") == 1
        assert await picker.series("pointsman_xds_version") == 3


async def test_a_busy_port_is_named_with_its_flag(tmp_path: Path) -> None:
    """As with all the other ports."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        flags = XdsFlags(busy.getsockname()[1])
        with pytest.raises(StartError, match=r"--xds-port\): the port is already in use"):
            async with whole_picker(tmp_path, xds=flags):
                pass
