"""Sampling fields, in the ranges of vLLM 0.32 → parameters of the engine and of the text."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from worker.api.http.field_errors import Field, FieldError, malformed, quoted
from worker.api.schema.parse import shown
from worker.api.schema.requests import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_XARGS_BYTES,
    RANGES,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    RepetitionFields,
    SamplingFields,
)
from worker.errors import RequestError
from worker.logits_processors import chosen
from worker.types import BeamParams, RepetitionDetection, SamplingParams

GREEDY_BELOW = 1e-5  # vLLM's bound
MIN_TEMPERATURE = 0.01  # a smaller one overflows the softmax of half-precision logits
MAX_LOGIT_BIAS = 100.0
_INT64 = 1 << 63
_MAX_DIGITS = 20  # more than any vocabulary needs; `int` raises beyond 4,300

# Fields that would change the answers of a beam search, and are not built.
_NOT_WITH_BEAMS = (
    *("stream", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens"),
    *("allowed_token_ids", "stop", "stop_token_ids", "logprob_token_ids", "repetition_detection"),
    *("vllm_xargs", "resume"),
)
_NAMED = ("temperature", "top_p")  # the others' faults have no `param`, as in vLLM


@dataclass(frozen=True, slots=True)
class TextParams:
    """The parameters of the conversion from tokens to text, in the API process.

    `echo_only` answers with the prompt alone, without the one token that the engine had to draw.
    `eos_id` is the model's own end (None: ignored); `extra_eos_ids` are reported as the reason for
    a stop. `shown_ids` are control tokens that the text keeps for the parsers of answers.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    echo_only: bool = False
    eos_id: int | None = None
    extra_eos_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """A model's limits. `vocab_size` counts embeddings; `max_logprobs` -1: the whole vocabulary."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The model's own `defaults`, and `encode`, which returns a text's ids without a prefix."""

    limits: ModelLimits
    encode: Callable[[str], list[int]]
    defaults: Mapping[str, float] = field(default_factory=dict)
    logits_processors: Sequence[str] = ()


def invalid(name: str, value: object, *message: str) -> FieldError:
    """Return a 400 whose message ends with the field and its value, as vLLM's do."""
    end = f", value={shown(value)})"
    return FieldError(*message, " (parameter=", Field(name), end, param=name)


class Sampling(NamedTuple):
    """The checked sampling fields; `n` is the number of answers to each prompt."""

    params: SamplingParams
    text: TextParams
    n: int


def sampling_of(
    request: GenerationFields,
    max_tokens: int,
    prompt_sizes: Sequence[int],
    context: SamplingContext,
    rng: random.Random,
    *,
    searches: bool,
    constraint: str | None = None,
) -> Sampling:
    """Check the sampling fields for prompts of `prompt_sizes` tokens and fill in defaults.
    `searches`: a beam search would run here. `constraint` names the field that constrains the
    answers. Raises `RequestError`.
    """
    limits = context.limits
    params = sampling_params(request, max_tokens, _num_logprobs(request, limits), context, rng)
    if request.echo and isinstance(request, CompletionRequest) and params.prompt_logprobs is None:
        # An echoed prompt shows the same log probabilities as the answer.
        params = replace(params, prompt_logprobs=params.logprobs)
    processors = _logits_processors(request.vllm_xargs, context)
    if processors:
        params = replace(params, logits_processors=processors)
    n = num_sequences(request, 1.0 if request.use_beam_search else params.temperature)
    beam = _beam_params(request, n, params.logprobs, limits) if searches else None
    if beam is not None:
        if constraint is not None:
            raise _not_with_beams(constraint)
        params = _searching(params, beam)
    if n * len(prompt_sizes) > MAX_PROMPTS:
        reason = f"n × the number of prompts must be at most {MAX_PROMPTS}."
        raise invalid("n", n, reason)
    name = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
    check_prompt_logprobs_size(params.prompt_logprobs, n * sum(prompt_sizes), name, limits)
    for size in prompt_sizes:
        _check_min_tokens(params.min_tokens, min(max_tokens, limits.max_model_len - size))
    return Sampling(params, text_params(request), n)


def _num_logprobs(request: GenerationFields, limits: ModelLimits) -> int | None:
    if isinstance(request, CompletionRequest):
        return check_logprobs("logprobs", request.logprobs, limits)
    assert isinstance(request, ChatRequest)  # noqa: S101 (there are no others)
    likeliest = request.top_logprobs or 0
    _check_count("top_logprobs", likeliest)
    if request.logprobs:
        return check_logprobs("logprobs", likeliest, limits)
    if likeliest:
        reason = "when using `top_logprobs`, `logprobs` must be set to true."
        raise invalid("top_logprobs", likeliest, reason)
    return None


def text_params(request: SamplingFields) -> TextParams:
    return TextParams(
        stop=_stop_strings(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
    )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        reason = f" takes at most {MAX_STOP_STRINGS} strings"
        raise malformed((Field("stop"), reason), "stop")
    for string in strings:
        if not string:
            raise FieldError(Field("stop"), " cannot contain an empty string.")
        if len(string.encode("utf-8", "replace")) > MAX_STOP_BYTES:
            raise RequestError(f"a stop string has at most {MAX_STOP_BYTES} bytes", param="stop")
    return strings


def sampling_params(
    request: SamplingFields,
    max_tokens: int,
    logprobs: int | None,
    context: SamplingContext,
    rng: random.Random,
) -> SamplingParams:
    """Check fields and fill in defaults. `logprobs` is what the API's own fields ask for; `rng`
    draws seeds.
    """
    limits = context.limits
    # A further field with a range needs its row in `RANGES` alone.
    ranged: dict[str, Any] = {name: _in_range(request, name, context) for name in RANGES}
    if ranged["top_p"] == 0:
        raise invalid("top_p", ranged["top_p"], "top_p must be in (0, 1], got 0.")
    top_k = _top_k(request, context)
    if ranged["temperature"] < GREEDY_BELOW:
        # Filters do not change which token is the likeliest.
        top_k, ranged["temperature"], ranged["top_p"], ranged["min_p"] = 0, 0.0, 1.0, 0.0
    elif ranged["temperature"] < MIN_TEMPERATURE:
        ranged["temperature"] = MIN_TEMPERATURE
    fixed_ids = _token_ids(
        request.logprob_token_ids, "logprob_token_ids", limits, MAX_LOGPROB_TOKEN_IDS
    )
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=top_k,
        seed=_seed(request.seed, rng),
        min_tokens=_check_min_tokens(request.min_tokens, max_tokens),
        stop_token_ids=_token_ids(request.stop_token_ids, "stop_token_ids", limits),
        ignore_eos=bool(request.ignore_eos),
        repetition_penalty=_repetition_penalty(request, context),
        logit_bias=_logit_bias(request.logit_bias, limits),
        bad_words=_bad_words(request.bad_words, context),
        allowed_token_ids=_allowed_token_ids(request, limits),
        # Fixed tokens are shown beside the drawn one.
        logprobs=0 if logprobs is None and fixed_ids else logprobs,
        prompt_logprobs=check_logprobs(
            "prompt_logprobs", request.prompt_logprobs, limits, "prompt"
        ),
        logprob_token_ids=fixed_ids,
        repetition_detection=_repetition(request.repetition_detection, limits),
        **ranged,
    )


def _logits_processors(
    arguments: dict[str, Any] | None, context: SamplingContext
) -> tuple[tuple[str, str], ...]:
    if not arguments:
        return ()
    try:
        if not context.logits_processors:
            raise ValueError("no logits processor is loaded; leave it out or send {}")
        if len(msgspec.json.encode(arguments)) > MAX_XARGS_BYTES:
            raise ValueError(f"at most {MAX_XARGS_BYTES} bytes of JSON")
        return chosen(context.logits_processors, arguments)
    except ValueError as error:
        name = "vllm_xargs"
        raise FieldError("`", Field(name), f"`: {error}", param=name) from error


def num_sequences(request: SamplingFields, temperature: float) -> int:
    n = 1 if request.n is None else int(request.n)
    if n < 1:
        raise RequestError(f"n must be at least 1, got {n}.")
    if n > MAX_SEQUENCES:
        raise invalid("n", n, f"n must be at most {MAX_SEQUENCES}, got {n}.")
    # vLLM refuses it as well: the answers would be copies.
    if n > 1 and temperature == 0:
        raise RequestError(f"n must be 1 when using greedy sampling, got {n}.")
    return n


def _beam_params(
    request: SamplingFields, n: int, logprobs: int | None, limits: ModelLimits
) -> BeamParams | None:
    if not request.use_beam_search:
        for name, neutral in (
            ("best_of", (1, n)),
            ("length_penalty", (1,)),
            ("early_stopping", (False,)),
        ):
            if getattr(request, name) not in (None, *neutral):
                reason = f"`{name}` goes with a beam search; leave it out or send use_beam_search"
                raise RequestError(reason, param=name)
        return None
    for name in _NOT_WITH_BEAMS:
        if getattr(request, name, None):
            raise _not_with_beams(name)
    if request.repetition_penalty not in (None, 1):
        raise _not_with_beams("repetition_penalty")
    width = n if request.best_of is None else int(request.best_of)
    # Each beam needs two candidates, one of which may be an end.
    most = min(MAX_SEQUENCES, limits.vocab_size // 2)
    if not n <= width <= most:
        raise invalid(
            "best_of", width, f"best_of, the width of the search, must be from n={n} to {most}."
        )
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    if not abs(penalty) <= MAX_LENGTH_PENALTY:
        reason = f"length_penalty must be in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]."
        raise invalid("length_penalty", penalty, reason)
    return BeamParams(width, float(penalty), request.early_stopping, logprobs)


def _not_with_beams(name: str) -> FieldError:
    return quoted(name, "cannot be used with a beam search; leave it out")


def _searching(params: SamplingParams, beam: BeamParams) -> SamplingParams:
    """Return a search's parameters: it uses the model's log probabilities, as no token is drawn."""
    return SamplingParams(
        params.max_tokens,
        temperature=0.0,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        beam=beam,
    )


def check_logprobs(
    name: str, asked: int | None, limits: ModelLimits, kind: str = "sample"
) -> int | None:
    if asked is None:
        return None
    _check_count(name, asked)
    most = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    wanted = limits.vocab_size if asked == -1 else asked
    if wanted > most:
        reason = f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: {most}"
        raise invalid(name, wanted, reason)
    return int(asked)


def _check_count(name: str, asked: int) -> None:
    if asked < -1:
        raise invalid(name, asked, f"`{name}` must be a positive value or -1.")


def _in_range(request: SamplingFields, name: str, context: SamplingContext) -> float:
    default, low, high = RANGES[name]
    value = getattr(request, name)
    if value is None:
        value = context.defaults.get(name, default)
    if not math.isfinite(value) or not low <= value <= high:
        message = f"{name} must be in [{low:g}, {high:g}], got {value}."
        raise invalid(name, value, message) if name in _NAMED else RequestError(message)
    return float(value)


def _repetition_penalty(request: SamplingFields, context: SamplingContext) -> float:
    value = request.repetition_penalty
    if value is None:
        value = context.defaults.get("repetition_penalty", 1.0)
    if not math.isfinite(value) or value <= 0:
        reason = f"repetition_penalty must be greater than zero, got {value}."
        raise RequestError(reason)
    return float(value)


def _top_k(request: SamplingFields, context: SamplingContext) -> int:
    top_k = request.top_k
    if top_k is None:
        return max(0, min(int(context.defaults.get("top_k", 0)), context.limits.vocab_size))
    if top_k < -1:
        raise RequestError(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    # -1 and 0 both switch it off.
    return max(0, min(int(top_k), context.limits.vocab_size))


def _check_min_tokens(min_tokens: int | None, max_tokens: int) -> int:
    if min_tokens is None:
        return 0
    limit = "greater than or equal to 0" if min_tokens < 0 else ""
    if min_tokens > max_tokens:
        limit = f"less than or equal to max_tokens={max_tokens}"
    if limit:
        raise FieldError(Field("min_tokens"), f" must be {limit}, got {min_tokens}.")
    return int(min_tokens)


def _seed(seed: int | None, rng: random.Random) -> int:
    if seed is None or seed == -1:
        return rng.getrandbits(63)
    # A seed has 63 bits, like a drawn one.
    return seed & (_INT64 - 1)


def _token_ids(
    ids: Sequence[float] | None, name: str, limits: ModelLimits, most: int | None = None
) -> tuple[int, ...]:
    """Return the ids without repetitions, at most `most` (None: the size of the vocabulary). Their
    number is checked first, and each one only if something is wrong: there may be millions.
    """
    if not ids:
        return ()
    most = limits.vocab_size if most is None else most
    if len(ids) > most:
        raise RequestError(f"{name} takes at most {most} ids, got {len(ids)}", param=name)
    distinct = dict.fromkeys(ids)
    if set(map(type, distinct)) != {int} or min(distinct) < 0 or max(distinct) >= limits.vocab_size:
        distinct = dict.fromkeys(_token_id(i, name, limits) for i in distinct)
    return tuple(map(int, distinct))


def _token_id(token_id: float, name: str, limits: ModelLimits) -> int:
    if token_id != token_id // 1:
        raise invalid(name, token_id, f"Expected `int`, got {token_id}.")
    if not 0 <= token_id < limits.vocab_size:
        # A number of thousands of digits cannot be written out.
        got = token_id if abs(token_id) < _INT64 else "a number of more than 64 bits"
        reason = f"{name} must be in [0, {limits.vocab_size}), got {got}."
        raise invalid(name, got, reason)
    return int(token_id)


def _allowed_token_ids(request: SamplingFields, limits: ModelLimits) -> tuple[int, ...] | None:
    if request.allowed_token_ids is None:
        return None
    if not request.allowed_token_ids:
        raise invalid("allowed_token_ids", [], "allowed_token_ids is not None and empty!")
    return _token_ids(request.allowed_token_ids, "allowed_token_ids", limits)


def _logit_bias(
    biases: Mapping[str, float] | None, limits: ModelLimits
) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    if len(biases) > MAX_LOGIT_BIASES:
        message = f"logit_bias takes at most {MAX_LOGIT_BIASES} entries, got {len(biases)}"
        raise RequestError(message, param="logit_bias")
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        digits = key.strip()
        if len(digits) > _MAX_DIGITS or not digits.isdecimal() or not digits.isascii():
            raise invalid("logit_bias", key, "A key of logit_bias must be a token id")
        token_id = int(digits)
        if token_id >= limits.vocab_size:
            reason = f"token_id(s) [{token_id}] in logit_bias contain out-of-vocab token ids."
            raise invalid("logit_bias", key, f"{reason} Vocabulary size: {limits.vocab_size}")
        # OpenAI's bounds are clamped, not refused, as in vLLM.
        pairs[token_id] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))
    return tuple(pairs.items())


def _bad_words(words: list[str] | None, context: SamplingContext) -> tuple[tuple[int, ...], ...]:
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        message = f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(words)}"
        raise RequestError(message, param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for word in words:
        stripped = word.lstrip()
        if not stripped:
            raise RequestError("bad_words cannot contain an empty string.")
        if len(stripped) > 16 * MAX_BAD_WORD_TOKENS:  # not worth tokenizing
            num_tokens = MAX_BAD_WORD_TOKENS + 1
        # Tokens spell a word within a text with the blank before it, and a first word without.
        for text in () if num_tokens > MAX_BAD_WORD_TOKENS else (stripped, " " + stripped):
            ids = tuple(context.encode(text))
            _check_known(ids, context.limits)
            if ids and ids not in sequences:
                sequences[ids] = None
                num_tokens += len(ids)
        if num_tokens > MAX_BAD_WORD_TOKENS:
            message = f"bad_words may have at most {MAX_BAD_WORD_TOKENS} tokens in total"
            raise RequestError(message, param="bad_words")
    return tuple(sequences)


def _check_known(ids: Sequence[int], limits: ModelLimits) -> None:
    if max(ids, default=0) >= limits.vocab_size:
        reason = f"bad_words must be of tokens in [0, {limits.vocab_size}), got {max(ids)}."
        raise RequestError(reason, param="bad_words")


def check_prompt_logprobs_size(
    num_likeliest: int | None, num_tokens: int, name: str, limits: ModelLimits
) -> None:
    if num_likeliest is None:
        return
    # The prompt's own token is shown besides the likeliest.
    each = 1 + (limits.vocab_size if num_likeliest == -1 else num_likeliest)
    if each * num_tokens > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"The log probabilities of the prompts would be {each * num_tokens} (the prompts'"
            f" tokens × n × the number of each), which is more than {MAX_PROMPT_LOGPROBS}",
            param=name,
        )


def _repetition(fields: RepetitionFields | None, limits: ModelLimits) -> RepetitionDetection | None:
    if fields is None or fields.max_pattern_size == 0:
        return None
    longest = fields.max_pattern_size
    shortest = 1 if fields.min_pattern_size is None else fields.min_pattern_size
    count = 2 if fields.min_count is None else fields.min_count
    if not 1 <= shortest <= longest:
        reason = f"1 <= min_pattern_size ({shortest}) <= max_pattern_size ({longest}) must hold"
        raise RequestError(f"repetition_detection: {reason}")
    if count < 2 or longest * count > limits.max_model_len:
        reason = "min_count must be at least 2, and max_pattern_size × min_count fit the context"
        raise RequestError(f"repetition_detection: {reason}")
    return RepetitionDetection(int(longest), int(shortest), int(count))
