"""A run that cannot end says who waits for whom."""

import pytest
import simpy

from kairox_sim.watchdog import run_to_end


def holding(env, mine, others):
    """Hold one resource, then want the other one's."""
    with mine.request() as held:
        yield held
        yield env.timeout(5)
        with others.request() as wanted:
            yield wanted


def test_two_that_hold_what_the_other_waits_for():
    env = simpy.Environment()
    link, pool = simpy.Resource(env), simpy.Resource(env)
    processes = {
        "gpu": env.process(holding(env, link, pool)),
        "host": env.process(holding(env, pool, link)),
    }
    with pytest.raises(RuntimeError) as error:
        run_to_end(env, processes)
    assert str(error.value) == (
        "at 5 ns nothing can happen any more: gpu waits for host to give up a resource; "
        "host waits for gpu to give up a resource"
    )


def test_waiting_for_an_event_or_a_process():
    env = simpy.Environment()
    never = env.event()

    def wait_for(event):
        yield event

    gpu = env.process(wait_for(never))
    reader = env.process(wait_for(gpu))
    with pytest.raises(RuntimeError, match=r"gpu waits for the sums; reader waits for gpu$"):
        run_to_end(env, {"gpu": gpu, "reader": reader}, lambda event: "the sums")


def test_it_stops_when_they_have_finished_and_not_before():
    env = simpy.Environment()

    def work(ns):
        yield env.timeout(ns)

    run_to_end(env, {"a": env.process(work(9)), "b": env.process(work(5))})
    assert env.now == 9
    background = env.timeout(100)
    run_to_end(env, {"c": env.process(work(1))})
    assert env.now == 10
    assert not background.processed


def test_a_failure_is_raised_as_it_is():
    env = simpy.Environment()

    def fail():
        yield env.timeout(1)
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_to_end(env, {"a": env.process(fail())})
