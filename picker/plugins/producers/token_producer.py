"""token-producer: the tokens of each prompt of a request, packed as little-endian uint32.

Token ids in a body (`ParsedBody.prompts`) are taken as they are. Else the parameters decide:

- `estimate` (the default): pseudo-tokens made of the prompt's bytes, `tokenization.estimate`;
  `estimate.image` and `estimate.video` give the token counts of media, `tokenization.media`.
- `vllm: {url, timeout, mmTimeout}` with `modelName` (which alone is enough): real tokens, requested
  from the render routes of a server of that model, `tokenization.render`. `mmTimeout` applies where
  a message's content is a list. When the server fails there are no tokens.

Several prompts (a list of strings, or of token lists) are one entry each in
`InferenceRequest.prompts`, with their items in `features`. `udsTokenizerConfig` is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from base.durations import parse_duration
from picker.framework.attributes import Attributes, DataKey
from picker.framework.registry import Parameters, PluginType
from picker.framework.services import HttpClient, HttpError, Services
from picker.tokenization.estimate import PromptEstimator
from picker.tokenization.media import EstimateParameters, MediaTokens
from picker.tokenization.prompt_stream import Prompt
from picker.tokenization.render import prompts_of, question_of
from picker.types import Candidates, InferenceRequest

_tokens_of, _features_of = attrgetter("tokens"), attrgetter("features")

TOKENIZED_PROMPT: DataKey[None] = DataKey("TokenizedPrompt", "token-producer")


class VllmParameters(Parameters, frozen=True):
    url: str = "http://localhost:8000"
    timeout: str = "5s"
    mm_timeout: str = "30s"


class TokenProducerParameters(Parameters, frozen=True):
    estimate: EstimateParameters | None = None
    vllm: VllmParameters | None = None
    model_name: str = ""
    uds_tokenizer_config: dict[str, Any] | None = None


class TokenProducer:
    produces = (TOKENIZED_PROMPT,)

    def __init__(self, parameters: EstimateParameters | None = None) -> None:
        parameters = parameters or EstimateParameters()
        parameters.check()
        self._estimator = PromptEstimator(MediaTokens(parameters))

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Return the request with prompts; unchanged if it has them or lacks a readable body."""
        body = request.body
        # Another producer, or an earlier stage, may have tokenized the request already.
        if request.prompts:
            return request
        if body.prompts:
            return _with_tokens_of_body(request)
        if body.payload is None:
            return request
        return _with(request, self._estimator.prompts(body.api, body.payload, request.headers))


@dataclass(frozen=True, slots=True)
class RenderedTokenProducer:
    """Requests the tokens of prompts for `model_name` from the server at `url`."""

    http: HttpClient
    url: str
    model_name: str
    text_timeout_seconds: float
    media_timeout_seconds: float

    @property
    def timeout_seconds(self) -> float:
        return max(self.text_timeout_seconds, self.media_timeout_seconds)

    @property
    def produces(self) -> tuple[DataKey[Any], ...]:
        return (TOKENIZED_PROMPT,)

    async def look_up(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Return the request with its prompts, unchanged for an API that is not rendered.

        Raises `HttpError` when the server does not answer with tokens.
        """
        if request.prompts:
            return request
        if request.body.prompts:
            return _with_tokens_of_body(request)
        question = question_of(request.body, self.model_name)
        if question is None:
            return request
        has_blocks = question.has_blocks
        answer = await self.http.post_json(
            self.url + question.path,
            question.body,
            timeout_seconds=self.media_timeout_seconds if has_blocks else self.text_timeout_seconds,
        )
        try:
            return _with(request, prompts_of(answer))
        except ValueError as error:
            raise HttpError(f"{self.url}{question.path}: {error}") from error


def _with_tokens_of_body(request: InferenceRequest) -> InferenceRequest:
    prompts = request.body.prompts
    return replace(request, prompts=prompts, features=request.body.features or ((),) * len(prompts))


def _with(request: InferenceRequest, prompts: Sequence[Prompt]) -> InferenceRequest:
    if not prompts:
        return request
    return replace(
        request, prompts=tuple(map(_tokens_of, prompts)), features=tuple(map(_features_of, prompts))
    )


def _create(
    parameters: TokenProducerParameters, services: Services
) -> TokenProducer | RenderedTokenProducer:
    if parameters.uds_tokenizer_config is not None:
        raise ValueError(
            "udsTokenizerConfig is not supported: it is deprecated where it comes from; "
            "use vllm.url, the address of a server with render routes"
        )
    if parameters.vllm is None and not parameters.model_name:
        return TokenProducer(parameters.estimate)
    if parameters.estimate is not None:
        raise ValueError("estimate excludes vllm and modelName")
    if not parameters.model_name:
        raise ValueError("vllm needs modelName, the model whose tokens are asked for")
    vllm = parameters.vllm or VllmParameters()
    if not vllm.url.startswith(("http://", "https://")):
        raise ValueError(f"vllm.url must begin with http:// or https://, got '{vllm.url}'")
    text, media = parse_duration(vllm.timeout), parse_duration(vllm.mm_timeout)
    if min(text, media) <= 0:
        raise ValueError("vllm.timeout and vllm.mmTimeout must be positive")
    url = vllm.url.rstrip("/")
    return RenderedTokenProducer(services.http, url, parameters.model_name, text, media)


PLUGIN = PluginType(
    "token-producer",
    _create,
    default_for=(TOKENIZED_PROMPT.data_type,),
    deprecated_aliases=("tokenizer",),
)
