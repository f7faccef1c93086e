"""What each tenant got: virtual token counters (Sheng et al., OSDI 2024).

1. Input counts once as it is computed, what the cache had not at all, output twice.
2. A tenant that comes back after having nothing here starts at the least of those who wait (of all
   present, if nobody does), so that nobody saves up while away; one long stream that wants no more
   than it has does not hold the start down.
3. Only tenants with requests here are counted, so there are never more counters than requests.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from attrs import define, field

OUTPUT_WEIGHT = 2.0


@define(eq=False)
class Service:
    """come / go / charge_input / charge_output, per tenant."""

    counters: dict[bytes, float] = field(init=False, factory=dict)
    shown: Mapping[bytes, float] = field(init=False)
    """The same for plug-ins: read-only."""
    _num_requests: dict[bytes, int] = field(init=False, factory=dict)
    _departed: dict[bytes, float] = field(init=False, factory=dict)
    """Counters of tenants that left and are still ahead of somebody present."""

    def __attrs_post_init__(self) -> None:
        self.shown = MappingProxyType(self.counters)

    def come(self, tenant: bytes, waiting: Iterable[bytes]) -> None:
        """A request of the tenant was admitted, while those ``waiting`` have some in the queue."""
        self.counters[tenant] = self.start(tenant, waiting)
        self._departed.pop(tenant, None)
        self._num_requests[tenant] = self._num_requests.get(tenant, 0) + 1

    def start(self, tenant: bytes, waiting: Iterable[bytes]) -> float:
        """What its counter would be then."""
        if tenant in self.counters:
            return self.counters[tenant]
        queued = [self.counters[other] for other in waiting if other in self.counters]
        least = min(queued or self.counters.values(), default=0.0)
        return max(least, self._departed.get(tenant, 0.0))

    def go(self, tenant: bytes) -> None:
        """A request of the tenant ended."""
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant]:
            return
        del self._num_requests[tenant]
        counter = self.counters.pop(tenant)
        least = min(self.counters.values(), default=None)
        if least is None:
            self._departed.clear()
            return
        self._departed[tenant] = counter
        self._departed = {t: c for t, c in self._departed.items() if c > least}

    def charge_input(self, tenant: bytes, num_tokens: int) -> None:
        self.counters[tenant] += num_tokens

    def charge_output(self, tenant: bytes, num_tokens: int = 1) -> None:
        self.counters[tenant] += OUTPUT_WEIGHT * num_tokens
