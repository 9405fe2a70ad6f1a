"""Host memory traffic: sharing, order and what is taken off the queue, worked out by hand."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.flows import NEVER, HostTraffic, water_fill

GB = 1e9  # bytes/s; 1 GB/s is one byte per ns


def settle_all(traffic, now_ns):
    ended = []
    while some := traffic.settle(now_ns):
        ended += some
    return [(e.end_ns, e.kind, e.key) for e in ended]


# -- water-filling ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "capacity", "rates"),
    [
        ([10, 20], 100, [10, 20]),  # nobody is short
        ([10, 20], 20, [10, 10]),  # 10 each: the first is content with that
        ([4, 20], 20, [4, 16]),  # 4 asks less than its half, the other gets the rest
        ([20, 4], 20, [16, 4]),
        ([30, 30], 20, [10, 10]),
        ([3, 9, 9], 15, [3, 6, 6]),  # 5 each; 2 left over; (15 - 3) / 2
        ([5], inf, [5]),
        ([], 7, []),
    ],
)
def test_water_fill(caps, capacity, rates):
    assert water_fill(caps, capacity) == rates


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
    st.floats(0.1, 300),
)
def test_water_fill_is_fair_and_gives_all_there_is(caps, capacity):
    rates = water_fill(caps, capacity)
    assert all(0 < rate <= cap for rate, cap in zip(rates, caps, strict=True))
    assert sum(rates) == pytest.approx(min(capacity, sum(caps)))
    # Whoever is kept below its cap gets as much as the best served.
    assert all(
        rate == pytest.approx(max(rates))
        for rate, cap in zip(rates, caps, strict=True)
        if rate < cap * (1 - 1e-12)
    )


# -- by hand ------------------------------------------------------------------------------------


def test_a_copy_takes_its_set_up_and_its_bytes():
    traffic = HostTraffic(4 * GB)
    traffic.submit_swaps("ab", 100, 6)
    assert settle_all(traffic, 10) == []  # starts at 10, not when it was submitted
    # 6 + 100 / 4 = 31 ns each
    assert settle_all(traffic, 40) == []
    assert settle_all(traffic, 41) == [(41, "swap", "a")]
    assert settle_all(traffic, 71) == []
    assert settle_all(traffic, 500) == [(72, "swap", "b")]
    assert traffic.swap_busy_ns(500) == 62


def test_ends_are_rounded_up_and_whole_quotients_are_not():
    traffic = HostTraffic(3 * GB)
    traffic.submit_swaps("a", 10, 0)  # 3.33 ns
    settle_all(traffic, 0)
    assert settle_all(traffic, 9) == [(4, "swap", "a")]
    traffic = HostTraffic(0.1 * GB)
    traffic.submit_swaps("a", 0.3, 0)  # 0.3 / 0.1 is 2.9999999999999996 or 3.0000000000000004
    settle_all(traffic, 0)
    assert settle_all(traffic, 9) == [(3, "swap", "a")]


def test_dram_limits_a_copy_that_is_alone():
    traffic = HostTraffic(4 * GB, 2 * GB)
    traffic.submit_swaps("a", 100, 6)
    settle_all(traffic, 0)
    assert settle_all(traffic, 100) == [(56, "swap", "a")]


def test_pool_and_link_share_dram():
    # Link 4, pool up to 6, DRAM 8 bytes/ns: together each gets 4; the pool alone has 6.
    # Swap: set up 0-10, during which the pool has 6. From 10 on 4 each.
    # Pool, 200 bytes: 60 by 10, the other 140 at 4: 10 + 35 = 45 if the swap goes on for so long.
    # Swap, 100 bytes from 10 at 4: 35. By then the pool has 60 + 100 = 160; 40 left at 6: 6.67 ns.
    traffic = HostTraffic(4 * GB, 8 * GB)
    traffic.submit_swaps("a", 100, 10)
    settle_all(traffic, 0)
    traffic.submit_cpu("rows", 200, 6 * GB, 0, 0)
    settle_all(traffic, 0)
    assert traffic.next_change_ns() == 10
    assert settle_all(traffic, 10) == []
    assert traffic.next_change_ns() == 35
    assert settle_all(traffic, 35) == [(35, "swap", "a")]
    assert traffic.next_change_ns() == 42
    assert settle_all(traffic, 42) == [(42, "cpu", "rows")]
    assert traffic.next_change_ns() == NEVER


def test_a_pool_that_starts_slows_a_copy_that_is_moving():
    # Link 6, pool 8, DRAM 8 bytes/ns: together 4 each. The pool is woken at 3 and reads from 10.
    # Swap of 120 bytes at 6: 60 by ns 10, then 4 each; 60 / 4 = 15: lands at 25.
    # Pool of 100 bytes: 60 by 25, the other 40 at 8: 30.
    traffic = HostTraffic(6 * GB, 8 * GB)
    traffic.submit_swaps("a", 120, 0)
    settle_all(traffic, 0)
    settle_all(traffic, 3)
    traffic.submit_cpu("rows", 100, 8 * GB, 10, 3)
    assert traffic.next_change_ns() == 10
    assert settle_all(traffic, 10) == []
    assert settle_all(traffic, 25) == [(25, "swap", "a")]
    assert settle_all(traffic, 30) == [(30, "cpu", "rows")]


def test_critical_goes_before_waiting_swaps_and_preempts_none():
    traffic = HostTraffic(1 * GB)
    traffic.submit_swaps("abc", 10, 0)
    settle_all(traffic, 0)
    settle_all(traffic, 4)
    assert traffic.submit_critical("x", 5, 1, 4) == 16  # a ends at 10, then 1 + 5
    assert traffic.next_change_ns() == NEVER  # nothing can change it
    assert settle_all(traffic, 99) == [
        (10, "swap", "a"), (16, "critical", "x"), (26, "swap", "b"), (36, "swap", "c"),
    ]  # fmt: skip
    assert traffic.swap_busy_ns(99) == 30


def test_a_pool_that_ends_with_a_swap_puts_its_sums_before_the_next_swap():
    # Both end at 10. What the pool's end makes the caller submit goes before what starts at 10.
    traffic = HostTraffic(1 * GB)
    traffic.submit_swaps("ab", 10, 0)
    settle_all(traffic, 0)
    traffic.submit_cpu("rows", 20, 2 * GB, 0, 0)
    ended = traffic.settle(10)
    assert [(e.kind, e.end_ns) for e in ended] == [("cpu", 10), ("swap", 10)]
    assert traffic.submit_critical("rows", 3, 0, 10) == 13
    assert traffic.settle(10) == []
    assert settle_all(traffic, 13) == [(13, "critical", "rows")]
    assert settle_all(traffic, 23) == [(23, "swap", "b")]


def test_landings_are_known_while_the_pool_is_idle():
    traffic = HostTraffic(2 * GB)
    with pytest.raises(RuntimeError, match="only while the pool is idle"):
        traffic.landing_ns("a")
    traffic.submit_swaps(["a", "b", "c"], 10, 1)
    traffic.submit_swaps(["d"], 4, 1)
    settle_all(traffic, 5)
    settle_all(traffic, 12)  # a: 5-11; b has begun
    assert [traffic.landing_ns(key) for key in "bcd"] == [17, 23, 26]
    traffic.submit_critical("x", 2, 0, 12)
    assert [traffic.landing_ns(key) for key in "bcd"] == [17, 24, 27]
    with pytest.raises(RuntimeError, match="'a' is neither on the link nor waiting"):
        traffic.landing_ns("a")


def test_one_layer_step_at_a_time():
    traffic = HostTraffic(1 * GB)
    traffic.submit_cpu("a", 1, GB, 0, 0)
    with pytest.raises(RuntimeError, match="one layer-step at a time"):
        traffic.submit_cpu("b", 1, GB, 0, 0)
    with pytest.raises(RuntimeError, match="with the pool, or another one, still at work"):
        traffic.submit_critical("a", 5, 0, 0)
    with pytest.raises(RuntimeError, match="only while the pool is idle"):
        traffic.landing_ns("c")
    settle_all(traffic, 1)
    traffic.submit_critical("a", 5, 0, 1)
    settle_all(traffic, 1)
    with pytest.raises(RuntimeError, match="one layer-step at a time"):
        traffic.submit_cpu("b", 1, GB, 2, 2)


def test_fetches_go_before_waiting_swaps_and_sums_after_them():
    # Swaps of 10 from 0; at 4 the pool begins, and two fetches of 1 + 5 are given.
    traffic = HostTraffic(1 * GB)
    traffic.submit_swaps("ab", 10, 0)
    settle_all(traffic, 0)
    settle_all(traffic, 4)
    traffic.submit_fetches("fg", 5, 1)
    traffic.submit_cpu("rows", 8, 1 * GB, 4, 4)
    assert settle_all(traffic, 12) == [(10, "swap", "a"), (12, "cpu", "rows")]
    assert [traffic.landing_ns(key) for key in "fgb"] == [16, 22, 32]
    assert traffic.submit_critical("rows", 3, 0, 12) == 25  # after both fetches
    with pytest.raises(RuntimeError, match="or another one, still at work"):
        traffic.submit_critical("again", 3, 0, 12)
    with pytest.raises(RuntimeError, match="one layer-step at a time"):
        traffic.submit_cpu("b", 1, GB, 13, 12)
    assert settle_all(traffic, 40) == [
        (16, "fetch", "f"), (22, "fetch", "g"), (25, "critical", "rows"), (35, "swap", "b"),
    ]  # fmt: skip
    assert traffic.swap_busy_ns(40) == 10 + 12 + 10


def test_what_has_not_begun_can_be_taken_off_the_queue():
    traffic = HostTraffic(1 * GB)
    traffic.submit_swaps("abcd", 10, 0)
    traffic.submit_swaps("ef", 5, 0)
    settle_all(traffic, 3)
    settle_all(traffic, 15)  # a 3-13, b has begun
    traffic.cancel_swaps({"a", "b", "c", "e", "nobody"})
    assert [traffic.landing_ns(key) for key in "bdf"] == [23, 33, 38]
    assert settle_all(traffic, 99) == [(23, "swap", "b"), (33, "swap", "d"), (38, "swap", "f")]
    assert traffic.on_link() is None


def test_busy_time_of_a_copy_under_way_counts_up_to_now():
    traffic = HostTraffic(1 * GB)
    assert traffic.swap_busy_ns(0) == 0
    assert traffic.on_link() is None
    traffic.submit_swaps("ab", 10, 0)
    settle_all(traffic, 5)
    settle_all(traffic, 8)
    assert traffic.swap_busy_ns(8) == 3
    assert traffic.on_link() == ("swap", "a", 5)
    settle_all(traffic, 19)
    assert traffic.swap_busy_ns(19) == 14
