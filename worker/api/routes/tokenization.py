"""Token ids of texts and conversations, and back: the same that generation would use."""

from __future__ import annotations

from functools import partial

import msgspec

from worker.api.generate.prepare import RequestPreparer
from worker.api.generate.text import ModelText
from worker.api.generate.translated import chat_of_messages
from worker.api.http.exchange import Exchange
from worker.api.http.limits import malformed
from worker.api.http.off_loop import off_loop_when_large
from worker.api.schema.answers import Detokenized, Tokenized, TokenizerInfo
from worker.api.schema.messages import CountedTokens
from worker.api.schema.parse import decode
from worker.api.schema.prompts import check_token_ids
from worker.api.schema.requests import DetokenizeRequest, TokenizeRequest
from worker.api.schema.routes import Handler
from worker.config import ApiConfig
from worker.errors import RequestError

# So many tokens may be asked about at once; as many as the context holds, where that is more.
MAX_DETOKENIZED_IDS = 1 << 18


class TokenizationRoutes:
    """`/tokenize`, `/detokenize`, `/tokenizer_info` and `/v1/messages/count_tokens`."""

    def __init__(self, config: ApiConfig, text: ModelText, preparer: RequestPreparer) -> None:
        self._config = config
        self._text = text
        self._preparer = preparer

    def handlers(self) -> dict[str, Handler]:
        """By the names of `routes.TEXT_ROUTES`."""
        return {
            "tokenize": self._tokenize,
            "count_tokens": self._count,
            "detokenize": self._detokenize,
            "tokenizer_info": self._info,
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        """A prompt gets the model's prefix unless told otherwise, a conversation does not (its
        template has written it).
        """
        body = await exchange.json_body(self._config.max_body_bytes)
        request = decode(body, TokenizeRequest)
        self._preparer.check_model(request.model)
        if (request.prompt is None) is (request.messages is None):
            raise malformed("Send either prompt or messages", "prompt")
        if request.messages is not None:
            prompt, special = self._text.render(request.messages, request), False
        else:
            prompt, special = request.prompt or "", True
        if request.add_special_tokens is not None:
            special = request.add_special_tokens
        ids = await self._text.encode(prompt, add_special_tokens=special)
        strings = await self._spelled(ids) if request.return_token_strs else None
        answer = Tokenized(len(ids), self._text.limits.max_model_len, ids, strings)
        await exchange.reply(msgspec.json.encode(answer))

    async def _count(self, exchange: Exchange) -> None:
        """What `usage.input_tokens` of the same message would be, had nothing been cached."""
        body = await exchange.json_body(self._config.max_body_bytes)
        chat = chat_of_messages(body, self._text)
        self._preparer.check_model(chat.model)
        prompt = self._text.render(chat.messages, chat)
        ids = await self._text.encode(prompt, add_special_tokens=False)
        await exchange.reply(msgspec.json.encode(CountedTokens(len(ids))))

    async def _spelled(self, ids: list[int]) -> list[str]:
        spelling = self._text.tokenizer.token_text
        return await off_loop_when_large(len(ids), lambda: [spelling(i) for i in ids])

    async def _detokenize(self, exchange: Exchange) -> None:
        """The text, control tokens included."""
        body = await exchange.json_body(self._config.max_body_bytes)
        request = decode(body, DetokenizeRequest)
        self._preparer.check_model(request.model)
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
