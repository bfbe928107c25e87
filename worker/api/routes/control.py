"""Operators' commands: pause, sleep, reset the cache, abort, inspect, load LoRA adapters."""

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from worker.api.generate.adapters import ServedAdapters
from worker.api.generate.engine import Engine
from worker.api.generate.open_sequences import OpenSequences
from worker.api.http.exchange import Exchange
from worker.api.http.off_loop import off_loop_when_large
from worker.api.schema import answers
from worker.api.schema.openapi import package_version
from worker.api.schema.parse import decode
from worker.api.schema.requests import AbortBody, LoadAdapterBody, UnloadAdapterBody
from worker.api.schema.routes import CONTROL_ROUTES, Handler, query_values
from worker.config import ApiConfig, EngineConfig
from worker.engine import messages
from worker.engine.messages import CachedBlock, Command, CommandReply
from worker.errors import RequestError

Values = dict[str, Any]
_TEXT_HEADERS = ((b"content-type", b"text/plain; charset=utf-8"),)


class ControlRoutes:
    def __init__(
        self,
        config: ApiConfig,
        engine: Engine,
        sequences: OpenSequences,
        engine_config: EngineConfig | None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._sequences = sequences
        self._engine_config = engine_config

    def handlers(self) -> dict[str, Handler]:
        actions: dict[str, Callable[[Values], Awaitable[object]]] = {
            "reset_prefix_cache": self._reset,
            "pause": self._pause,
            "resume": self._resume,
            "is_paused": self._is_paused,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "is_sleeping": self._is_sleeping,
            "server_info": self._server_info,
            "kv_events_dump": self._dump,
        }
        routes = {route.name: route for route in CONTROL_ROUTES}

        async def act(exchange: Exchange, name: str) -> None:
            answer = await actions[name](query_values(exchange, routes[name]))
            await exchange.reply(msgspec.json.encode(answer))

        return {
            "abort": self._abort,
            "abort_unversioned": self._abort,
            **{name: partial(act, name=name) for name in actions},
        }

    async def _abort(self, exchange: Exchange) -> None:
        body = await exchange.json_body(self._config.max_body_bytes)
        self._sequences.abort(decode(body, AbortBody).request_ids)
        await exchange.reply(b"", headers=())

    async def _done(self, command: Command) -> CommandReply:
        reply = await self._engine.run(command)
        if not reply.ok:
            raise RequestError(reply.error or "The engine refused", status=400)
        return reply

    async def _reset(self, values: Values) -> object:
        command = messages.ResetPrefixCache(0, reset_running=values["reset_running_requests"])
        # Blocks in use are no error: the answer is false.
        return answers.Success((await self._engine.run(command)).ok)

    async def _pause(self, values: Values) -> object:
        await self._done(messages.Pause(0, mode=values["mode"]))
        # Frozen sequences still need their blocks.
        if values["clear_cache"] and values["mode"] != "keep":
            await self._engine.run(messages.ResetPrefixCache(0))
        return answers.Status("paused")

    async def _resume(self, _values: Values) -> object:
        await self._done(messages.Resume(0))
        return answers.Status("resumed")

    async def _is_paused(self, _values: Values) -> object:
        return answers.IsPaused(self._engine.stats.is_paused)

    async def _sleep(self, values: Values) -> object:
        await self._done(messages.Sleep(0, level=values["level"], mode=values["mode"]))
        return answers.Sleeping("sleeping", values["level"])

    async def _wake_up(self, values: Values) -> object:
        await self._done(messages.WakeUp(0, tags=values["tags"]))
        awake = self._engine.stats.sleep_level is None
        return answers.Awake("awake" if awake else "sleeping", values["tags"])

    async def _is_sleeping(self, _values: Values) -> object:
        return answers.IsSleeping(self._engine.stats.sleep_level is not None)

    async def _server_info(self, values: Values) -> object:
        config = redacted(self._config, self._engine_config)
        shown = config if values["config_format"] == "json" else repr(config)
        return answers.ServerInfo(package_version(), shown)

    async def _dump(self, _values: Values) -> object:
        reply = await self._done(messages.DumpCache(0))
        block_size = 16 if self._engine_config is None else self._engine_config.block_size

        def dump() -> msgspec.Raw:
            page = answers.CacheDump(
                block_size, reply.event_sequence, list(map(_dumped, reply.blocks))
            )
            return msgspec.Raw(msgspec.json.encode(page))

        return await off_loop_when_large(sum(len(b.token_ids) for b in reply.blocks), dump)


def redacted(config: ApiConfig, engine_config: EngineConfig | None) -> dict[str, Any]:
    api: dict[str, Any] = msgspec.to_builtins(config)
    api["api_keys"] = f"{len(config.api_keys)} keys"
    engine = None if engine_config is None else msgspec.to_builtins(engine_config)
    if engine is not None and engine["prefix_caching_hash_seed"] is not None:
        engine["prefix_caching_hash_seed"] = "set"
    return {"api": api, "engine": engine}


def _dumped(block: CachedBlock) -> answers.DumpedBlock:
    parent = None if block.parent is None else block.parent.hex()
    scope = (block.cache_salt, block.lora_name)
    return answers.DumpedBlock(block.block_hash.hex(), parent, block.token_ids, *scope)


class AdapterRoutes:
    def __init__(self, config: ApiConfig, adapters: ServedAdapters) -> None:
        self._max_body_bytes = config.max_body_bytes
        self._adapters = adapters

    def handlers(self) -> dict[str, Handler]:
        return {"load_lora_adapter": self._load, "unload_lora_adapter": self._unload}

    async def _load(self, exchange: Exchange) -> None:
        body = decode(await exchange.json_body(self._max_body_bytes), LoadAdapterBody)
        in_place = bool(body.load_inplace)
        await self._adapters.load(body.lora_name, body.lora_path, in_place=in_place)
        await _succeed(exchange, body.lora_name, "added")

    async def _unload(self, exchange: Exchange) -> None:
        body = decode(await exchange.json_body(self._max_body_bytes), UnloadAdapterBody)
        await self._adapters.unload(body.lora_name)
        await _succeed(exchange, body.lora_name, "removed")


async def _succeed(exchange: Exchange, name: str, what: str) -> None:
    text = f"Success: LoRA adapter '{name}' {what} successfully."
    await exchange.reply(text.encode(), HTTPStatus.OK, _TEXT_HEADERS)
