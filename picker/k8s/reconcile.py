"""The pure half of discovery, which turns the objects of a pool into endpoints and rules.

When the pool's selector changes, the old Pods stay endpoints until the new ones are known. The end
of a pool removes its endpoints and rules. Nothing is published before everything is known once, so
that no request meets a partial state.
"""

import logging
from collections.abc import Collection, Container, Iterable, Mapping
from itertools import chain
from typing import Final

from picker.k8s.objects import PoolName
from picker.k8s.pods import ACTIVE_PORTS, PodRecord
from picker.k8s.pool_view import Contest, PodKey, PoolShape, PoolView, View
from picker.pool.datastore import Datastore, EndpointChanges
from picker.pool.policies import NO_RULES, Objective, RequestRules, RewriteRule, RuleSet

log = logging.getLogger(__name__)

RULES_TIMEOUT_SECONDS: Final = 5.0  # the wait for objectives and rewrites, once the Pods are known
LOG_SECONDS: Final = 1.0  # between two log lines about endpoints


class PoolReconciler:
    """Owns the known objects of a pool; all methods are synchronous, `now` is monotonic."""

    def __init__(self, pool: PoolName, datastore: Datastore, rules: RequestRules) -> None:
        self._pool, self._datastore, self._rules = pool, datastore, rules
        self._view: PoolView | None = None
        self._selector: str | None = None
        self._wanted: PoolShape | None = None
        self._is_gone = False
        self._objectives: tuple[Objective, ...] | None = None
        self._rewrites: tuple[RewriteRule, ...] | None = None
        self._is_shown = False  # the datastore has the endpoints of the last look
        self._rules_due_at: float | None = None
        self._log = _EndpointLog(str(pool))

    @property
    def selectors(self) -> frozenset[str]:
        """The selectors to watch: the one in use, and the next one until its Pods are known."""
        wanted = () if self._wanted is None else (self._wanted.selector,)
        used = () if self._selector is None else (self._selector,)
        return frozenset((*wanted, *used))

    def use_pool(self, wanted: PoolShape | None, now: float) -> None:
        """Set the shape of the pool; None: there is no pool."""
        self._is_gone = wanted is None
        self._wanted = wanted
        if wanted is None:
            self._view = self._selector = None
        elif self._view is not None and self._selector == wanted.selector:
            self._view.use(wanted, now)

    def use_pods(
        self,
        selector: str,
        records: Mapping[PodKey, PodRecord],
        changed: Collection[PodKey],
        now: float,
    ) -> None:
        """Set all Pods of a selector, which equal the last ones except for `changed`."""
        wanted = self._wanted
        if selector == self._selector and self._view is not None:
            self._view.update(records, changed, now)
        elif wanted is not None and selector == wanted.selector:
            if self._view is None:
                self._view, self._is_shown = PoolView(wanted), False
            self._view.use(wanted, now)
            self._view.replace(records, now)
            self._selector = selector

    def use_objectives(self, objectives: Iterable[Objective]) -> None:
        self._objectives = tuple(sorted(objectives, key=lambda one: one.name))

    def use_rewrites(self, rewrites: Iterable[tuple[RewriteRule, ...]]) -> None:
        rules = chain.from_iterable(rewrites)
        self._rewrites = tuple(sorted(rules, key=lambda one: (one.name, one.position)))

    def apply(self, now: float, stale: Container[str] = ()) -> float | None:
        """Update datastore and rules; return the next due time. `stale` names broken watches."""
        if self._is_gone:
            self._clear()
            return None
        if self._view is None:
            return None
        if self._objectives is None or self._rewrites is None:
            waits_until = self._wait_for_rules(now)
            if waits_until is not None:
                return waits_until
        look = self._view.look(now, is_current=self._selector not in stale)
        rules = RuleSet(self._objectives or (), self._rewrites or ())
        if self._rules.use(rules):
            text = "%s: %d objectives, %d rules of rewrites"
            log.info(text, self._pool, len(rules.objectives), len(rules.rewrites))
        self._show(self._view, look)
        for one in look.contests:
            self._warn_of(one)
        dues = [one for one in (look.next_due, self._log.write(now)) if one is not None]
        return min(dues, default=None)

    def _show(self, view: PoolView, look: View) -> None:
        if not self._is_shown:
            changes = self._datastore.set_endpoints(view.endpoints)
        elif look.changed or look.gone:
            changes = self._datastore.change_endpoints(look.changed, look.gone)
        else:
            return
        self._is_shown = True
        self._log.note(changes, self._datastore.size)

    def _warn_of(self, contest: Contest) -> None:
        log.warning(
            "%s: the Pods %s and %s both claim port %s of %s, where %s serves now: give each a "
            "containerPort or an annotation %s of its own",
            self._pool,
            "/".join(contest.loser),
            "/".join(contest.winner),
            ", ".join(map(str, contest.ports)),
            contest.address,
            "/".join(contest.winner),
            ACTIVE_PORTS,
        )

    def _wait_for_rules(self, now: float) -> float | None:
        """Return the end of the wait for objectives and rewrites; None if it is over."""
        if self._rules_due_at is None:
            self._rules_due_at = now + RULES_TIMEOUT_SECONDS
        if now < self._rules_due_at:
            return self._rules_due_at
        if not self._is_shown:
            missing = [
                name
                for name, known in (("objectives", self._objectives), ("rewrites", self._rewrites))
                if known is None
            ]
            log.warning("%s: continues without %s for now", self._pool, " and ".join(missing))
        return None

    def _clear(self) -> None:
        self._rules.use(NO_RULES)
        if self._datastore.synced:
            self._datastore.forget_pool()
        if self._is_shown:
            log.warning("%s: the pool is gone, and its endpoints and rules with it", self._pool)
            self._is_shown = False


class _EndpointLog:
    def __init__(self, name: str) -> None:
        self._name = name
        self._total, self._added, self._removed = 0, 0, 0
        self._is_first, self._is_due = True, False
        self._written_at = float("-inf")

    def note(self, changes: EndpointChanges, total: int) -> None:
        self._total = total
        self._added += len(changes.added)
        self._removed += len(changes.removed)
        self._is_due = self._is_first or bool(self._added or self._removed)

    def write(self, now: float) -> float | None:
        """Log the changes if a line is due; return the time when a pending line will be due."""
        if not self._is_due:
            return None
        due = self._written_at + LOG_SECONDS
        if now < due:
            return due
        text = "%s: %d endpoints (%d added, %d removed)"
        log.info(text, self._name, self._total, self._added, self._removed)
        self._added = self._removed = 0
        self._is_first = self._is_due = False
        self._written_at = now
        return None
