"""Conversion of texts and conversations to the token ids that generation uses, and back."""

from functools import partial

import msgspec

from worker.api.http.exchange import Exchange
from worker.api.http.field_errors import malformed
from worker.api.http.off_loop import off_loop_when_large
from worker.api.openai.checks import RequestChecks, check_token_ids
from worker.api.schema.answers import Detokenized, Tokenized, TokenizerInfo
from worker.api.schema.parse import decode
from worker.api.schema.requests import DetokenizeRequest, TokenizeRequest
from worker.api.schema.routes import Handler
from worker.errors import RequestError

# Tokens of one request; as many as the context holds, where that is more.
MAX_DETOKENIZED_IDS = 1 << 18


class TokenizationRoutes:
    def __init__(self, checks: RequestChecks) -> None:
        self._config = checks.config
        self._text = checks.text
        self._adapters = checks.adapters

    def handlers(self) -> dict[str, Handler]:
        return {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "tokenizer_info": self._info,
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        """Answer with token ids; by default, a conversation's template adds the model's prefix."""
        body = await exchange.json_body(self._config.max_body_bytes)
        request = decode(body, TokenizeRequest)
        self._adapters.adapter_of(request.model)
        if (request.prompt is None) is (request.messages is None):
            raise malformed("Send either prompt or messages", "prompt")
        special = request.add_special_tokens
        if request.messages is not None:
            prompt = await self._text.chat_prompt(
                request.messages, request, add_special_tokens=bool(special)
            )
            ids = prompt.ids
        else:
            ids = await self._text.encode(
                request.prompt or "", add_special_tokens=special is not False
            )
        strings = await self._spelled(ids) if request.return_token_strs else None
        answer = Tokenized(len(ids), self._text.limits.max_model_len, ids, strings)
        await exchange.reply(msgspec.json.encode(answer))

    async def _spelled(self, ids: list[int]) -> list[str]:
        spelling = self._text.tokenizer.token_text
        return await off_loop_when_large(len(ids), lambda: [spelling(i) for i in ids])

    async def _detokenize(self, exchange: Exchange) -> None:
        body = await exchange.json_body(self._config.max_body_bytes)
        request = decode(body, DetokenizeRequest)
        self._adapters.adapter_of(request.model)
        ids = request.tokens
        most = max(MAX_DETOKENIZED_IDS, self._text.limits.max_model_len)
        if len(ids) > most:
            raise RequestError(f"tokens takes at most {most} ids, got {len(ids)}", param="tokens")
        check_token_ids(ids, self._text.limits, "tokens")
        decode_ids = partial(self._text.tokenizer.decode, ids, skip_special_tokens=False)
        text = await off_loop_when_large(len(ids), decode_ids)
        await exchange.reply(msgspec.json.encode(Detokenized(text)))

    async def _info(self, exchange: Exchange) -> None:
        tokenizer, template = self._text.tokenizer, self._text.template
        special = {tokenizer.token_text(i): i for i in sorted(tokenizer.special_ids)}
        answer = TokenizerInfo(
            type(tokenizer).__name__,
            self._text.limits.vocab_size,
            self._text.limits.max_model_len,
            special,
            None if template is None else template.source,
        )
        await exchange.reply(msgspec.json.encode(answer))
