"""The models that endpoints say they serve, as candidates carry them."""

from __future__ import annotations

from dataclasses import dataclass

# Under this name candidates carry a tuple of `ServedModel`.
MODELS_ATTRIBUTE = "/v1/models/models-data-extractor"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of an endpoint's `/v1/models`; 0 and "" for what it does not say.

    `parent` is the model that a LoRA adapter belongs to.
    """

    id: str
    object: str = ""
    created: int = 0
    owned_by: str = ""
    parent: str = ""
