"""Replacement algorithms one access at a time, as plainly as they can be written.

Each function takes a stream of ids and a capacity, and returns for every access whether it missed.
They share nothing with the policies: no arrays, no sets per step, no residency from outside.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence


def fifo(stream: Sequence[int], capacity: int) -> list[bool]:
    queue: deque[int] = deque()  # oldest first
    missed = []
    for neuron in stream:
        missed.append(neuron not in queue)
        if missed[-1]:
            if len(queue) == capacity:
                queue.popleft()
            queue.append(neuron)
    return missed


def lru(stream: Sequence[int], capacity: int) -> list[bool]:
    queue: list[int] = []  # longest unused first
    missed = []
    for neuron in stream:
        missed.append(neuron not in queue)
        if not missed[-1]:
            queue.remove(neuron)
        elif len(queue) == capacity:
            del queue[0]
        queue.append(neuron)
    return missed


def lfu(stream: Sequence[int], capacity: int) -> list[bool]:
    """Counts begin when an id enters and end when it leaves; ties to the least recently used."""
    uses: dict[int, list[int]] = {}  # id -> [count, time of the last use]
    missed = []
    for now, neuron in enumerate(stream):
        missed.append(neuron not in uses)
        if missed[-1] and len(uses) == capacity:
            del uses[min(uses, key=uses.__getitem__)]
        uses[neuron] = [uses.get(neuron, [0])[0] + 1, now]
    return missed


def sieve(stream: Sequence[int], capacity: int) -> list[bool]:
    """Zhang et al., NSDI '24: a FIFO queue, a bit each, and a hand that moves to newer ids."""
    queue: list[int] = []  # oldest first
    visited: dict[int, bool] = {}
    hand = 0  # index of the next id it looks at
    missed = []
    for neuron in stream:
        missed.append(neuron not in visited)
        if not missed[-1]:
            visited[neuron] = True
            continue
        if len(queue) == capacity:
            while visited[queue[hand]]:
                visited[queue[hand]] = False
                hand = (hand + 1) % capacity
            del visited[queue.pop(hand)]
            hand = hand if hand < len(queue) else 0  # past the newest: back to the oldest
        queue.append(neuron)
        visited[neuron] = False
    return missed


def s3fifo(stream: Sequence[int], capacity: int) -> list[bool]:
    """Yang et al., SOSP '23, with the choices of libCacheSim.

    Small holds a tenth, rounded down but not to 0; the ghost nine tenths of the capacity. Two uses
    in small lead to main. Until something was evicted, what does not fit in small goes to main.
    """
    n_small, n_ghost = max(1, int(capacity * 0.1)), int(capacity * 0.9)
    n_main = capacity - n_small
    small: deque[int] = deque()  # oldest first, as main and ghost
    main: deque[int] = deque()
    ghost: deque[int] = deque()
    uses: dict[int, int] = {}
    evicted_yet = False
    missed = []
    for neuron in stream:
        missed.append(neuron not in uses)
        if not missed[-1]:
            uses[neuron] += 1
            continue
        remembered = neuron in ghost
        if remembered:
            ghost.remove(neuron)
        while len(small) + len(main) == capacity:
            evicted_yet = True
            if len(main) > n_main or not small:
                oldest = main.popleft()
                if uses[oldest]:
                    uses[oldest] = min(uses[oldest], 3) - 1
                    main.append(oldest)
                else:
                    del uses[oldest]
                continue
            while small:
                oldest = small.popleft()
                if uses[oldest] >= 2:
                    uses[oldest] = 0
                    main.append(oldest)
                    continue
                del uses[oldest]
                ghost.append(oldest)
                if len(ghost) > n_ghost:
                    ghost.popleft()
                break
        uses[neuron] = 0
        if remembered or (not evicted_yet and len(small) >= n_small):
            main.append(neuron)
        else:
            small.append(neuron)
    return missed


def arc(stream: Sequence[int], capacity: int) -> list[bool]:
    """Megiddo and Modha, FAST '03, figure 4, with a target that is not rounded."""
    t1: OrderedDict[int, None] = OrderedDict()  # longest unused first, as all four
    t2: OrderedDict[int, None] = OrderedDict()
    b1: OrderedDict[int, None] = OrderedDict()
    b2: OrderedDict[int, None] = OrderedDict()
    target = 0.0
    missed = []

    def replace(in_b2: bool) -> None:
        if (t1 and (len(t1) > target or (in_b2 and len(t1) == target))) or not t2:
            b1[t1.popitem(last=False)[0]] = None
        else:
            b2[t2.popitem(last=False)[0]] = None

    for neuron in stream:
        missed.append(neuron not in t1 and neuron not in t2)
        full = len(t1) + len(t2) == capacity
        if not missed[-1]:
            t1.pop(neuron, None)
            t2.pop(neuron, None)
            t2[neuron] = None
        elif neuron in b1:
            target = min(target + max(len(b2) / len(b1), 1), capacity)
            del b1[neuron]
            if full:
                replace(False)
            t2[neuron] = None
        elif neuron in b2:
            target = max(target - max(len(b1) / len(b2), 1), 0)
            del b2[neuron]
            if full:
                replace(True)
            t2[neuron] = None
        else:
            if full and len(t1) + len(b1) == capacity:
                if b1:
                    b1.popitem(last=False)
                    replace(False)
                else:
                    t1.popitem(last=False)
            elif full:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.popitem(last=False)
                replace(False)
            t1[neuron] = None
    return missed


def belady(stream: Sequence[int], capacity: int) -> list[bool]:
    """Give up what is used again last of all; everything enters."""
    never = len(stream)
    following, coming = [never] * never, {}
    for now in range(never - 1, -1, -1):
        following[now] = coming.get(stream[now], never)
        coming[stream[now]] = now
    here: dict[int, int] = {}  # id -> its next use
    missed = []
    for now, neuron in enumerate(stream):
        missed.append(neuron not in here)
        if missed[-1] and len(here) == capacity:
            del here[max(here, key=here.__getitem__)]
        here[neuron] = following[now]
    return missed


def wtinylfu(stream: Sequence[int], capacity: int) -> list[bool]:
    """Einziger, Friedman and Manes, ACM ToS 2017, with exact counts.

    The window holds max(1, 1 %) of the capacity; of the rest a fifth is probation and four fifths
    are protected, rounded down. Counts are halved every 10 * capacity accesses. A tie keeps the
    resident of the main part.
    """
    n_window = max(1, capacity // 100)
    n_protected = int(0.8 * (capacity - n_window))
    window: OrderedDict[int, None] = OrderedDict()  # longest unused first, as all three
    probation: OrderedDict[int, None] = OrderedDict()
    protected: OrderedDict[int, None] = OrderedDict()
    uses: dict[int, int] = {}
    missed = []
    for now, neuron in enumerate(stream, 1):
        uses[neuron] = uses.get(neuron, 0) + 1
        if now % (10 * capacity) == 0:
            uses = {i: count // 2 for i, count in uses.items()}
        missed.append(not (neuron in window or neuron in probation or neuron in protected))
        if neuron in window:
            window.move_to_end(neuron)
        elif neuron in protected:
            protected.move_to_end(neuron)
        elif neuron in probation:
            del probation[neuron]
            protected[neuron] = None
            if len(protected) > n_protected:
                probation[protected.popitem(last=False)[0]] = None
        else:
            window[neuron] = None
            if len(window) <= n_window:
                continue
            pushed = window.popitem(last=False)[0]
            if len(window) + len(probation) + len(protected) < capacity:
                probation[pushed] = None
                continue
            main = probation or protected
            if main and uses[pushed] > uses[next(iter(main))]:
                main.popitem(last=False)
                probation[pushed] = None
    return missed
