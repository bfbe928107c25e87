"""The order in which idle blocks are used again, fair between tenants.

*Empty* blocks are used first, as a stack. Every held or cached block counts for the *tenant* that
it was last taken for, not for the last that hit it: a flood of requests that begin like another
tenant's must not take over that tenant's blocks. A tenant's *share* is the number of blocks over
the number of tenants that have any. When nothing is empty, the oldest cached block of the tenants
above their share is taken; with nothing idle there, the oldest of all. So a tenant within its share
loses nothing while one above its share has an idle block, and no idle block is ever refused.
Everything but the choice between tenants is O(1); at most `MAX_TENANTS` have a queue of their own.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.errors import IntegrityError

MAX_TENANTS = 64


@dataclass(slots=True, eq=False)
class _Account:
    tenant: str | None  # None: all tenants beyond `MAX_TENANTS`
    num_blocks: int = 0
    idle: OrderedDict[int, int] = field(default_factory=OrderedDict)  # block → stamp, oldest first


class FreeQueue:
    """Sole owner of the idle blocks' order and of the tenants' accounts.

    Blocks 0 to `num_blocks`−1 start out empty and are taken in that order. Without `fair` all
    tenants are one.
    """

    def __init__(self, num_blocks: int, fair: bool) -> None:
        self._num_blocks = num_blocks
        self._fair = fair
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._accounts: dict[str | None, _Account] = {}
        self._owners: list[_Account | None] = [None] * num_blocks
        self._num_idle = num_blocks
        self._stamp = 0
        self.last_loser = ""  # the tenant for which the cached block counted that was taken last

    def __len__(self) -> int:
        return self._num_idle

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    def __iter__(self) -> Iterator[int]:
        """Yield the empty blocks, then the cached ones by tenant, oldest first."""
        yield from reversed(self._empty)
        for account in self._accounts.values():
            yield from account.idle

    def take(self, tenant: str) -> int:
        """Return the idle block to use next for `tenant`; the caller forgets its contents."""
        taker = self._account(tenant)
        # Before the choice of a victim: a tenant that takes more than its share evicts its own.
        taker.num_blocks += 1
        self._num_idle -= 1
        if self._empty:
            block = self._empty.pop()
        else:
            loser = self._victim()
            block, _ = loser.idle.popitem(last=False)
            self.last_loser = loser.tenant or ""
            self._disown(block)
        self._owners[block] = taker
        return block

    def coldest(self) -> int | None:
        """Return the cached idle block that is taken first when none is empty, if there is one."""
        return next(iter(self._victim().idle)) if self._num_idle > len(self._empty) else None

    def put_empty(self, block: int) -> None:
        self._disown(block)
        self._empty.append(block)
        self._num_idle += 1

    def put_cached(self, block: int) -> None:
        self._owner_of(block).idle[block] = self._next_stamp()
        self._num_idle += 1

    def remove(self, block: int) -> None:
        del self._owner_of(block).idle[block]
        self._num_idle -= 1

    def touch(self, block: int) -> None:
        """Make a cached idle block the most recently used one."""
        queue = self._owner_of(block).idle
        queue[block] = self._next_stamp()
        queue.move_to_end(block)

    def empty(self, block: int) -> None:
        del self._owner_of(block).idle[block]
        self._disown(block)
        self._empty.append(block)

    def check_integrity(self, cached: set[int], held: set[int]) -> None:
        queued = [block for account in self._accounts.values() for block in account.idle]
        if sorted(queued) != sorted(cached - held):
            raise IntegrityError("the queues do not hold exactly the idle cached blocks")
        if sorted(self._empty) != sorted(set(range(self._num_blocks)) - cached - held):
            raise IntegrityError("the empty blocks are not those neither held nor cached")
        if self._num_idle != len(queued) + len(self._empty):
            raise IntegrityError("the number of idle blocks is wrong")
        if len(self._accounts) > MAX_TENANTS + 1:
            raise IntegrityError("too many tenants have accounts")
        self._check_accounts(cached | held)

    def _check_accounts(self, owned: set[int]) -> None:
        if owned != {block for block, owner in enumerate(self._owners) if owner is not None}:
            raise IntegrityError("a block counts for no tenant, or an empty one for some")
        for tenant, account in self._accounts.items():
            if account.tenant != tenant or account.num_blocks != self._owners.count(account):
                raise IntegrityError(f"the account of tenant {tenant!r} does not add up")
            if account.num_blocks == 0:
                raise IntegrityError(f"tenant {tenant!r} has an account but no blocks")
            stamps = list(account.idle.values())
            if stamps != sorted(stamps):
                raise IntegrityError(f"the queue of tenant {tenant!r} is out of order")
            if any(self._owners[block] is not account for block in account.idle):
                raise IntegrityError(f"tenant {tenant!r} queues a block not its own")

    def _victim(self) -> _Account:
        candidates = [account for account in self._accounts.values() if account.idle]
        if len(candidates) > 1:
            num_tenants = len(self._accounts)
            above = [a for a in candidates if a.num_blocks * num_tenants > self._num_blocks]
            return min(above or candidates, key=lambda account: next(iter(account.idle.values())))
        return candidates[0]

    def _account(self, tenant: str) -> _Account:
        key: str | None = tenant if self._fair else ""
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) - (None in self._accounts) >= MAX_TENANTS:
                key = None
                account = self._accounts.get(None)
            if account is None:
                account = self._accounts[key] = _Account(key)
        return account

    def _owner_of(self, block: int) -> _Account:
        owner = self._owners[block]
        if owner is None:
            raise IntegrityError(f"block {block} counts for no tenant")
        return owner

    def _disown(self, block: int) -> None:
        owner = self._owner_of(block)
        self._owners[block] = None
        owner.num_blocks -= 1
        if owner.num_blocks == 0:
            del self._accounts[owner.tenant]

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp
