"""Typed findings of data producers, valid for one decision."""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataKey(Generic[T]):
    """Names a finding: what it is and which producer instance made it. Printed `Type/producer`."""

    data_type: str
    producer: str

    def __str__(self) -> str:
        return f"{self.data_type}/{self.producer}"


class Attributes:
    """The findings of one decision. Owned by the director for the length of that decision."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[DataKey[Any], Any] = {}

    def put(self, key: DataKey[T], value: T) -> None:
        """Store a finding; a second one under the same key replaces the first."""
        self._values[key] = value

    def get(self, key: DataKey[T]) -> T | None:
        """The finding, or None when no producer made it."""
        return cast("T | None", self._values.get(key))

    def items(self) -> ItemsView[DataKey[Any], Any]:
        """All findings with their keys, in the order they were made."""
        return self._values.items()

    def of_type(self, data_type: str) -> tuple[Any, ...]:
        """The findings of one type, of whichever producers, in the order they were made."""
        return tuple(value for key, value in self._values.items() if key.data_type == data_type)
