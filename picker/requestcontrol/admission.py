"""Admission: the fairness id of a request, and the refusals that are the director's own."""

import hashlib
import re
from collections.abc import Mapping

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo
from picker.requestcontrol.headers import FAIRNESS_ID, first_of
from picker.requestcontrol.plugin_log import PLUGIN_FAILED
from picker.types import InferenceRequest, SchedulingResult

PREFER = "prefer"
IF_AVAILABLE = "if-available"
MAX_FAIRNESS_ID = 256  # characters
_PREFIX = 64
# Possessive, and accepts a quotation without an end: otherwise a header takes quadratic time.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*+"?', re.DOTALL)


def fairness_id(request: InferenceRequest) -> str:
    """Return the fairness id of a request's header, else the one that processors set."""
    named = first_of(request.headers, FAIRNESS_ID) or request.fairness_id
    if len(named) > MAX_FAIRNESS_ID:  # flow control stores thousands, and clients choose them
        digest = hashlib.sha256(named.encode(errors="surrogatepass")).hexdigest()
        named = f"{named[:_PREFIX]}…{digest}"
    return named


def refuse_if_not_cached(
    request: InferenceRequest, result: SchedulingResult, attributes: Attributes
) -> None:
    """Refuse with 412 a request that needs a cached prompt, unless some block of it is cached."""
    if PREFER not in request.headers or not prefers_if_available(request.headers):
        return
    key = result.endpoints[0].key
    for info in attributes.of_type(MATCH_INFO):
        if isinstance(info, PrefixCacheMatchInfo) and info.match_blocks.get(key):
            return
    raise RefusedError(
        Code.PRECONDITION_FAILED,
        "no part of the prompt is in the cache of the chosen endpoint (Prefer: if-available)",
        reference="no decode worker has the requested KV cache",
    )


def prefers_if_available(headers: Mapping[str, str]) -> bool:
    """True if the `Prefer` header (RFC 7240) lists `if-available`; parameters are ignored."""
    value = headers.get(PREFER)
    if not value:
        return False
    return any(
        preference.partition(";")[0].strip().lower() == IF_AVAILABLE
        for preference in _QUOTED.sub('""', value).split(",")
    )


def scheduling_failed(error: Exception) -> RefusedError:
    """Return the refusal for a scheduler's error: the first one in a group of errors, else 429."""
    refusal = _first_refusal(error)
    if refusal is not None:
        return refusal
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        f"no endpoint could be chosen: {PLUGIN_FAILED}",
        reference=f"failed to find target endpoint: {PLUGIN_FAILED}",
    )


def _first_refusal(error: BaseException) -> RefusedError | None:
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_first_refusal, error.exceptions)), None)
    return None
