"""Keeps all processes going by the same objectives and rewrites."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from picker.pool.request_rules import RequestRules
from picker.processes.serving import Serving


class RuleTelling:
    """Tells the serving processes when the rules of requests have changed.

    A process begins with the rules of the moment at which it is started, so those that begin to
    serve are looked at as well.
    """

    def __init__(self, rules: RequestRules, members: Callable[[], Sequence[Serving]]) -> None:
        """`members` are those that serve now."""
        self._rules, self._members = rules, members
        self._due = asyncio.Event()
        rules.subscribe(lambda _: self._due.set())

    def look(self) -> None:
        """One more process serves."""
        self._due.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            rules = self._rules.current
            behind = [one for one in self._members() if one.rules is not rules]
            await asyncio.gather(*(one.follow(rules) for one in behind))
