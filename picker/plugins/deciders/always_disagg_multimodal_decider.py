"""always-disagg-multimodal-decider: requests with images, video or audio get encode endpoints.

run ⇔ any prompt of the request has a multi-modal item
"""

from __future__ import annotations

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.types import Candidate, InferenceRequest


class MultiModalDecider:
    """Says yes to what has something to encode. Stateless."""

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        """Whether there is an item; the tokenizer's findings count, else the parser's."""
        return any(request.features or request.body.features)

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        """There is but one reason."""
        return "the request has no image, video or audio"


PLUGIN = PluginType("always-disagg-multimodal-decider", Parameters, plain(MultiModalDecider))
