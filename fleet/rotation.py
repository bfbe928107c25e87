"""Which parts of a fleet take requests: the files that the picker and Envoy follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fleet.envoy.bootstrap import endpoints_document, pickers_document
from fleet.envoy.settings import SocketAddress
from fleet.plan import PickerPlan, Plan, endpoints_yaml


class Rotation:
    """Writes the three files, each time as a whole: a reader sees what was or what is."""

    def __init__(self, layout: Plan) -> None:
        self._plan = layout

    def endpoints(self, workers: Mapping[str, SocketAddress]) -> None:
        """The picker sends requests to these workers, by name."""
        text = endpoints_yaml(workers, self._plan.options.objectives)
        _replace(self._plan.endpoints_path, text)

    def pool(self, workers: Iterable[SocketAddress]) -> None:
        """Envoy sends requests to these workers and no others, whoever picks them."""
        _replace(self._plan.pool_path, endpoints_document(list(workers)))

    def pickers(self, pickers: Iterable[PickerPlan]) -> None:
        """Envoy asks these pickers."""
        known = [(one.ext_proc, one.health) for one in pickers]
        _replace(self._plan.pickers_path, pickers_document(known))


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)
