"""Everything but generation: health, models, metrics, tokenization. Cheap, and never touching the
engine process.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

import msgspec

from worker.api.admission import Admission
from worker.api.engine import Engine
from worker.api.exchange import Exchange
from worker.api.openai import RequestPreparer, TextSide
from worker.api.params import check_token_ids
from worker.api.schema import DetokenizeRequest, TokenizeRequest, decode
from worker.config import ApiConfig
from worker.errors import RequestError
from worker.metrics import CONTENT_TYPE, WorkerMetrics
from worker.tokenizer.detokenize import decode as decode_tokens

_METRICS_HEADERS = ((b"content-type", CONTENT_TYPE.encode()),)


def _version() -> str:
    try:
        return version("pointsman")
    except PackageNotFoundError:
        return "0"


class AdminRoutes:
    """The operators' and tools' side of the API. `created` in model cards is its start."""

    def __init__(
        self,
        config: ApiConfig,
        text: TextSide,
        preparer: RequestPreparer,
        engine: Engine,
        admission: Admission,
        metrics: WorkerMetrics,
    ) -> None:
        self._config = config
        self._text = text
        self._preparer = preparer
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._version = msgspec.json.encode({"version": _version()})
        self._models = msgspec.json.encode(
            {
                "object": "list",
                "data": [_model_card(name, config) for name in config.served_model_names],
            }
        )

    async def health(self, exchange: Exchange) -> None:
        """200 while the engine can serve, also during a drain; 503 when it is gone."""
        alive = self._engine.is_alive
        await exchange.reply(b"", HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE, ())

    async def ready(self, exchange: Exchange) -> None:
        """200 while new requests are let in; 503 from the start of a drain on."""
        open_door = self._engine.is_alive and not self._admission.draining
        status = HTTPStatus.OK if open_door else HTTPStatus.SERVICE_UNAVAILABLE
        await exchange.reply(b"", status, ())

    async def version(self, exchange: Exchange) -> None:
        """The version of this package."""
        await exchange.reply(self._version)

    async def load(self, exchange: Exchange) -> None:
        """Sequences inside this worker."""
        await exchange.reply(b'{"server_load":%d}' % self._admission.num_inside)

    async def models(self, exchange: Exchange) -> None:
        """The served names, as OpenAI's model list."""
        await exchange.reply(self._models)

    async def metrics(self, exchange: Exchange) -> None:
        """The Prometheus page."""
        page = self._metrics.render(self._engine.stats, time.monotonic())
        await exchange.reply(page, HTTPStatus.OK, _METRICS_HEADERS)

    async def tokenize(self, exchange: Exchange) -> None:
        """Token ids of a prompt or of a conversation, the same that generation would use."""
        body = await exchange.json_body(self._config.max_body_bytes)
        request = decode(body, TokenizeRequest)
        self._preparer.check_model(request.model)
        if (request.prompt is None) is (request.messages is None):
            raise RequestError("Send either prompt or messages", param="prompt")
        if request.messages is not None:
            prompt, special = self._text.render(request.messages, request), False
        else:
            prompt, special = request.prompt or "", True
        if request.add_special_tokens is not None:
            special = request.add_special_tokens
        ids = await self._text.encode(prompt, add_special_tokens=special)
        texts = [self._text.tokenizer.token_text(i) for i in ids]
        answer = {
            "count": len(ids),
            "max_model_len": self._text.limits.max_model_len,
            "tokens": ids,
            "token_strs": texts if request.return_token_strs else None,
        }
        await exchange.reply(msgspec.json.encode(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        """The text of token ids, control tokens included."""
        body = await exchange.json_body(self._config.max_body_bytes)
        request = decode(body, DetokenizeRequest)
        self._preparer.check_model(request.model)
        check_token_ids(request.tokens, self._text.limits)
        text = decode_tokens(self._text.tokenizer.token_bytes, request.tokens)
        await exchange.reply(msgspec.json.encode({"prompt": text}))


def _model_card(name: str, config: ApiConfig) -> dict[str, object]:
    created = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",  # what clients of these series of servers expect
        "root": config.model_root or name,
        "parent": None,
        "max_model_len": config.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": False,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
