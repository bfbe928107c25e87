"""Load and unload LoRA adapters, as vLLM does."""

from http import HTTPStatus

from worker.api.generate.adapters import ServedAdapters
from worker.api.http.exchange import Exchange
from worker.api.schema.parse import decode
from worker.api.schema.requests import LoadAdapterBody, UnloadAdapterBody
from worker.api.schema.routes import Handler
from worker.config import ApiConfig

_TEXT_HEADERS = ((b"content-type", b"text/plain; charset=utf-8"),)


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
