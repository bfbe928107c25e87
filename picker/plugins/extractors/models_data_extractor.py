"""models-data-extractor: the models that an endpoint serves, from its `/v1/models`.

Attribute `/v1/models/models-data-extractor`: a tuple of `ServedModel`, in the endpoint's order. An
entry without an id is skipped and reported; after a body that is not a list of models, the previous
models remain. Takes no parameters.
"""

from typing import Any

import msgspec

from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel
from picker.framework.registry import Parameters, PluginType
from picker.scrape.sources import ExtractError, Extraction, Scrape


class ModelsDataExtractor(Parameters, frozen=True):
    def extract(self, scrape: Scrape) -> Extraction:
        try:
            body = msgspec.json.decode(scrape.page)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ExtractError(f"the list of models is not valid JSON: {error}") from None
        entries = body.get("data") if isinstance(body, dict) else None
        if not isinstance(entries, list):
            raise ExtractError("the list of models has no list 'data'")
        models = tuple(_model(one) for one in entries if _has_id(one))
        skipped = len(entries) - len(models)
        problems = (f"{skipped} models without an id",) if skipped else ()
        names = frozenset(one.id for one in models)
        return Extraction(attributes={MODELS_ATTRIBUTE: models}, problems=problems, models=names)


def _has_id(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str) and bool(entry["id"])


def _model(entry: dict[str, Any]) -> ServedModel:
    created = entry.get("created")
    return ServedModel(
        id=entry["id"],
        object=_text(entry, "object"),
        created=created if isinstance(created, int) and not isinstance(created, bool) else 0,
        owned_by=_text(entry, "owned_by"),
        parent=_text(entry, "parent"),
    )


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return value if isinstance(value, str) else ""


PLUGIN = PluginType("models-data-extractor", ModelsDataExtractor)
