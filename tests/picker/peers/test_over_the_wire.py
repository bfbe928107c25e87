"""Whole pickers that tell each other what they do, over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from ext_proc_stream import completion, destination_of
from metrics_pages import page, pods, serving
from replicas_scene import (
    LOOPBACK,
    free_ports,
    peer_flags,
    replica,
    two_replicas,
    until_connected,
)
from whole_picker import WholePicker, until

from picker.peers.messages import Hello, Seed, Told
from picker.peers.wire import TELL_METHOD, encoded_told

PROMPT = "the same beginning " * 100
PAGES = [page() for _ in range(4)]


async def ask(picker: WholePicker, prompt: str = PROMPT, **headers: str) -> str:
    """Where one request goes; it ends at once."""
    async with picker.stream() as stream:
        messages = await stream.ask(completion(prompt=prompt), headers or None)
        return destination_of(messages)


async def until_counted(picker: WholePicker, result: str, count: float) -> None:
    """Return once so many entries of peers have become this."""

    async def is_so() -> bool:
        return (await picker.series("pointsman_peer_entries_total", result=result) or 0) >= count

    await until(is_so)


async def test_a_prompt_goes_where_the_other_replica_has_sent_it(tmp_path: Path) -> None:
    """Although each has drawn a seed of its own for its hashes."""
    async with two_replicas(tmp_path, pods(*PAGES)) as (first, second):
        sent = {}
        for number in range(8):
            sent[number] = await ask(first, f"{number} " + PROMPT)
        await until_counted(second, "placement", 8)
        assert {n: await ask(second, f"{n} " + PROMPT) for n in range(8)} == sent


async def test_what_one_has_under_way_is_load_for_the_other_until_it_ends(tmp_path: Path) -> None:
    """Also in what its scorers and its people are told."""
    async with two_replicas(tmp_path, pods(*PAGES)) as (first, second):
        async with first.stream() as stream:
            messages = await stream.ask(completion(prompt=PROMPT))
            busy = destination_of(messages)

            async def sees_it() -> bool:
                rows = await second.endpoints()
                return [row["inflight_requests"] for row in rows.values()].count(1) == 1

            await until(sees_it)
            assert await ask(second, "something else " * 100) != busy
        await until(second.is_idle)
