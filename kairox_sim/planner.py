"""The policy's decisions on their way to the link, and what becomes of their copies.

The cache's policy decides, one plan at a time, in order; here that only takes time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kairox_sim.cache import NeuronCache
from kairox_sim.cost_model import CostModel
from kairox_sim.events import Swap
from kairox_sim.flows import to_ns
from kairox_sim.host import Host
from kairox_sim.policies.base import Ids, Share
from kairox_sim.stream import Process, Stream


@dataclass(slots=True)
class Planner:
    """Knows when each layer's latest plan was made and which copy is its last.

    bytes_when: what h2d_bytes are of. None: they follow from the number of loads. "issued": the
    reads that the swaps of each plan are. "landed": what a poll found, where copies may be called
    off.
    """

    cache: NeuronCache
    costs: CostModel
    host: Host
    stream: Stream
    cancels: bool  # late copies are called off
    policy_class: str = field(init=False)
    bytes_when: str | None = field(init=False)
    free_ns: int = 0
    decided_ns: list[int] = field(init=False)  # [n_layers]
    last_swap: list[int] = field(init=False)  # [n_layers] id; -1: it had none

    def __post_init__(self) -> None:
        policy, n_layers = self.cache.policy, self.cache.n_layers
        own_name = type(policy).__name__.lower()
        self.policy_class = getattr(policy, "cost_class", own_name)  # an adapter's: the inner
        self.decided_ns, self.last_swap = [0] * n_layers, [-1] * n_layers
        self.bytes_when = None
        if self.cancels:
            self.bytes_when = "landed"
        elif self.costs.position is not None:
            self.bytes_when = "issued"

    def plan(self, layer: int, ids: Ids, share: Share | None) -> Process:
        """Ask the policy now; its copies go to the link when it has decided."""
        stream = self.stream
        yield from stream.catch_up()
        swaps = self._ask(layer, ids, share)
        decide_ns = to_ns(self.costs.decide_s(self.policy_class, len(swaps)))
        stream.tally.decide += decide_ns
        now_ns = stream.free_ns
        began_ns = max(now_ns, self.free_ns)
        decided_ns = self.free_ns = self.decided_ns[layer] = began_ns + decide_ns
        if stream.keep_slices:
            stream.keep("planner", "decide", layer, began_ns, decided_ns)
        if self.costs.decide_blocks_gpu:
            stream.wait_for_decision(decided_ns)
            yield from stream.catch_up()
        if decided_ns == stream.free_ns:
            self.host.submit(swaps)
        elif swaps:
            submission = stream.env.timeout(decided_ns - now_ns)
            submission.callbacks.append(lambda _: self._submit(swaps))

    def plan_and_land(self, layer: int, ids: Ids, share: Share | None) -> list[Swap]:
        """Decided and landed at once; only the link is used."""
        swaps = self._ask(layer, ids, share)
        self.host.submit(swaps)
        self.cache.commit(swap.id for swap in swaps)
        return swaps

    def wait_for_swaps(self, layer: int) -> Process:
        """Stall until the layer's plan has been made and every copy of it has landed."""
        stream = self.stream
        decide_ns = stream.wait_for_decision(self.decided_ns[layer])
        yield from stream.catch_up()
        flying = [swap for swap in self.cache.in_flight.values() if swap.layer == layer]
        io_ns = stream.wait_for_io(self.host.landing_ns(flying))
        if flying and decide_ns + io_ns:
            stream.tally.unfinished.add(layer)

    def commit(self, layer: int, landed: tuple[int, ...]) -> None:
        """What a poll found just before the layer's FFN, and what becomes of what it did not."""
        if self.bytes_when == "landed":
            self.stream.tally.swap_bytes += self._bytes(self.cache.in_flight[i] for i in landed)
        self.cache.commit(landed)
        # Copies land in the order of their ids, so that the last one tells of them all.
        if self.last_swap[layer] in self.cache.in_flight:
            self.stream.tally.unfinished.add(layer)
            if self.cancels:
                self._call_off(layer)

    # -- inside ---------------------------------------------------------------------------------

    def _ask(self, layer: int, ids: Ids, share: Share | None) -> list[Swap]:
        swaps = self.cache.plan(layer, ids, share)
        if swaps:
            self.last_swap[layer] = swaps[-1].id
            if self.bytes_when == "issued":
                self.stream.tally.swap_bytes += self._bytes(swaps)
        return swaps

    def _submit(self, swaps: list[Swap]) -> None:
        if self.cancels:  # some may have been called off while they were decided on
            swaps = [swap for swap in swaps if swap.id in self.cache.in_flight]
        self.host.submit(swaps)

    def _call_off(self, layer: int) -> None:
        """Q-Infer's stop rule: once the layer computes, its copies that have not begun never do."""
        mine = [swap for swap in self.cache.in_flight.values() if swap.layer == layer]
        off = self.host.call_off(mine)
        for swap in off:
            self.cache.cancel(swap.id, restore=True)
        self.last_swap[layer] = next((swap.id for swap in mine if swap not in off), -1)

    def _bytes(self, swaps: Iterable[Swap]) -> float:
        return sum(self.costs.swap_of(swap.layer, swap.promote)[0] for swap in swaps)
