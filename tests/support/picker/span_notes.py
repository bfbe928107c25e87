"""A tracer that remembers its spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Noted:
    name: str
    is_recorded: bool = True
    parts: list[Noted] = field(default_factory=list)
    said: dict[str, object] = field(default_factory=dict)
    failure: str | None = None
    ends: int = 0

    def set(self, name: str, value: str | int | float | bool) -> None:
        self.said[name] = value

    def fail(self, description: str) -> None:
        self.failure = description

    def end(self, at_ns: int | None = None) -> None:
        self.ends += 1

    def propagation(self) -> Mapping[str, str]:
        return {"traceparent": f"of {self.name}"}

    def tree(self) -> dict[str, object] | str:
        return {self.name: [part.tree() for part in self.parts]} if self.parts else self.name

    def everything(self) -> list[Noted]:
        return [self, *(one for part in self.parts for one in part.everything())]


class Notes:
    def __init__(self, *, sampled: bool = True) -> None:
        self.sampled = sampled
        self.requests: list[Noted] = []

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Noted:
        self.requests.append(Noted("request", self.sampled))
        return self.requests[-1]

    def begin(self, name: str, parent: object, at_ns: int) -> Noted:
        assert isinstance(parent, Noted)
        assert not parent.ends, f"{name} begins in {parent.name}, which is over"
        parent.parts.append(Noted(name, self.sampled))
        return parent.parts[-1]
