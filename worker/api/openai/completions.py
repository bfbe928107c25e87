"""`POST /v1/completions`: body → prompts → checks → requests to the engine → frames."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from worker.api.generate.answer_plans import AnswerPlan, constraint_of
from worker.api.generate.frames import (
    Answer,
    Delta,
    Ending,
    OpenAiFrames,
    TokenCounts,
    encode,
    fields_of_choice,
    or_null,
)
from worker.api.generate.logprobs import CompletionLogprobs
from worker.api.generate.prepared import Prepared
from worker.api.generate.text import Encode
from worker.api.http.arrival import Arrival
from worker.api.openai.checks import Prompts, RequestChecks, prompt_fields, prompts_of
from worker.api.schema.answers import TextChoice, TextCompletion
from worker.api.schema.parse import decode_supported
from worker.api.schema.requests import CompletionRequest

Json = dict[str, Any]


class CompletionApi:
    """Prepares text completions; without a limit the answer has 16 tokens."""

    def __init__(self, checks: RequestChecks, encode: Encode | None = None) -> None:
        self._checks = checks
        self._text = replace(checks.text, prompt_encoder=encode)

    async def __call__(self, body: bytes, arrival: Arrival) -> Prepared:
        return await self.prepared(decode_supported(body, CompletionRequest), arrival)

    async def prepared(self, request: CompletionRequest, arrival: Arrival) -> Prepared:
        adapter = self._checks.adapters.adapter_of(request.model)
        plan = AnswerPlan(constraint=constraint_of(request))
        tokenizer = self._text.tokenizer
        # Tokens without text take no room in the offsets.
        skip_ids = tokenizer.special_ids if request.skip_special_tokens is not False else set()
        return await self._checks.prepared(
            request,
            arrival,
            adapter,
            await self._prompts(request),
            plan,
            CompletionFrames,
            lambda as_ids: CompletionLogprobs(
                tokenizer.token_bytes, as_ids=as_ids, skip_ids=skip_ids
            ),
        )

    async def _prompts(self, request: CompletionRequest) -> Prompts:
        # A prompt to be truncated may be longer than the context.
        truncates = request.truncate_prompt_tokens is not None
        given = prompts_of(request.prompt, None if truncates else self._text.limits)
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        special = request.add_special_tokens is not False
        encoded = iter(await self._text.encode_all(texts, add_special_tokens=special))
        return Prompts(
            [next(encoded) if isinstance(prompt, str) else prompt for prompt in given],
            prompt_fields(given, request.prompt),
            are_encoded=isinstance(given[0], str),
            texts=texts if len(texts) == len(given) else (),
        )


class CompletionFrames(OpenAiFrames):
    kind = "text_completion"

    def opening(self, index: int, usage: TokenCounts | None) -> bytes:
        """Return a chunk with the prompt's token ids, if shown: there is no role to announce."""
        ids = self.prompt.ids_of(index)
        if ids is None:
            return b""
        choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,'
        facts = b'"prompt_token_ids":%b,"token_ids":[]}' % encode(ids)
        return self.start + choice % index + facts + self.tail(usage, None, last=False)

    def delta(self, delta: Delta) -> bytes:
        end = delta.ending or Ending("", None)
        ids = b"" if delta.token_ids is None else b',"token_ids":' + encode(delta.token_ids)
        return (
            self.start
            + b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}'
            % (
                delta.index,
                encode(delta.text),
                or_null(delta.logprobs),
                encode(end.finish_reason or None),
                encode(end.stop_reason),
                ids,
            )
            + self.tail(delta.usage, delta.metrics, last=delta.ending is not None)
        )

    def body(self, answers: Sequence[Answer], usage: TokenCounts, metrics: Json | None) -> bytes:
        return encode(
            TextCompletion(
                **self.fields_of_body(answers, usage, metrics),
                choices=[
                    TextChoice(
                        index=index,
                        text=answer.text,
                        prompt_logprobs=answer.prompt_logprobs,
                        prompt_token_ids=self.prompt.ids_of(index),
                        **fields_of_choice(answer),
                    )
                    for index, answer in enumerate(answers)
                ],
            )
        )
