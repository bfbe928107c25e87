"""What serving a request is taken to cost, before anybody knows."""

from __future__ import annotations

from picker.types import BYTES_PER_TOKEN, InferenceRequest

DEFAULT_OUTPUT_TOKENS = 128
MOST_OUTPUT_TOKENS = 32_768


def estimated_tokens(request: InferenceRequest) -> int:
    """Its prompt, and what it may generate."""
    prompt = request.num_tokens or request.size_bytes // BYTES_PER_TOKEN
    output = request.body.max_output_tokens
    if output is None:
        return prompt + DEFAULT_OUTPUT_TOKENS
    return prompt + max(0, min(output, MOST_OUTPUT_TOKENS))
