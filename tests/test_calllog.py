"""The call log says what was called, in order; replaying it repeats every decision bit for bit."""

import json
from dataclasses import astuple
from math import isnan
from typing import get_args

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from driving import LayerStep, Run, busy, drive, fresh, ids, plain, small_log

from kairox_sim.calllog import CallLogWriter, call_log_header, read_call_log, rebuild, replay
from kairox_sim.controllers import Anb, AnbPaper, Controller, Fixed, Knobs, SwapCap
from kairox_sim.errors import KairoxError
from kairox_sim.events import Cancelled, Committed, LookedUp, Planned, Split, StepEnded
from kairox_sim.policies import POLICIES, Lru, Tam
from kairox_sim.policies.base import Trigger
from kairox_sim.record import LayerWaits, StepRecord

MOVING = [name for name, policy in POLICIES.items() if policy.admits != "never"]
HEADER = {"n_layers": 1, "n_neurons": 8, "slots": 4, "settings": {"policy": "lru"}}


def chunked(run: Run) -> Run:
    """The same run, its first three steps prefill chunks with shares."""
    for step in run.steps[:3]:
        for at, layer in enumerate(step):
            ids = sorted(set(layer.predicted))
            step[at] = LayerStep(sorted(layer.evaluated), ids, sorted(layer.active), shares=True)
    return run


def controller_for(name: str) -> Controller:
    """One that changes what this policy reads, where there is one."""
    made = {"tam": Anb(initial=0.5), "tam_paper": AnbPaper(), "tam_released": SwapCap()}
    return made.get(name, Fixed())


def logged(tmp_path, name: str, run: Run, controller=None, **given):
    """(path of the log of a run, events as the cache told them)."""
    cache = run.cache(name, controller)
    path = tmp_path / "calls.arrow"
    told = []
    with CallLogWriter(path, call_log_header(cache, {"policy": name}), **given) as writer:

        def tell(event) -> None:
            told.append(event)
            writer.write(event)

        cache.journal = tell
        drive(cache, run)
        for swap_id in list(cache.in_flight)[:1]:
            cache.cancel(swap_id)
    return path, told


@pytest.mark.parametrize("per_batch", [50, 10_000])
def test_what_is_read_is_what_was_told(tmp_path, per_batch: int) -> None:
    path, told = logged(
        tmp_path, "tam", chunked(busy("attn_out", "predicted")), Anb(), events_per_batch=per_batch
    )
    header, events = read_call_log(path)
    assert plain(events) == plain(told)
    assert header["settings"] == {"policy": "tam"}
    assert header["format_version"] == 1
    kinds = {type(event) for event in events}
    assert kinds == {Planned, Committed, LookedUp, Cancelled, StepEnded}
    assert any(e.share is not None for e in events if isinstance(e, Planned))
    assert any(len(e.swaps) > 1 for e in events if isinstance(e, Planned))
    assert any(e.share is None for e in events if isinstance(e, LookedUp))


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("trigger", get_args(Trigger))
def test_g1_a_replayed_log_repeats_every_decision(tmp_path, name: str, trigger: Trigger) -> None:
    run = chunked(busy(trigger, "predicted", pinned=[[23], [], []], warm=[[3, 0], [2], []]))
    path, _ = logged(tmp_path, name, run, controller_for(name))
    header, events = read_call_log(path)
    fresh = rebuild(header, run.policy(name), controller_for(name))
    result = replay(events, fresh)
    assert result.differences == []
    assert result.steps == 60
    assert result.plans == sum(isinstance(e, Planned) for e in events)
    assert result.lookups == 180
    assert result.swaps == result.landed + result.cancelled + len(fresh.in_flight)
    counted = [result.swaps, result.loads, result.evictions, result.landed]
    counted += [result.hit_resident, result.hits, result.residuals]
    assert min(counted) > 0, counted
    if trigger != "instant":
        assert result.cancelled > 0
    if trigger not in ("instant", "after"):
        assert result.late > 0
    if fresh.controller.sets:
        assert len({e.knobs for e in events if isinstance(e, StepEnded)}) > 5
    fresh.check()


# -- the file -------------------------------------------------------------------------------------


def test_arrays_may_be_reused_after_the_call(tmp_path) -> None:
    path = tmp_path / "calls.arrow"
    reused, share = ids(1, 2), np.ones(2, np.float32)
    with CallLogWriter(path, HEADER) as writer:
        writer.write(Planned(0, reused, share, (), reused))
        writer.write(LookedUp(0, reused, reused, share, Split(0, reused, reused, reused)))
        reused[:], share[:] = 7, 0.5
    _, (plan, lookup) = read_call_log(path)
    assert plain(plan) == plain(Planned(0, ids(1, 2), np.ones(2, np.float32), (), ids(1, 2)))
    assert lookup.evaluated.tolist() == lookup.active.tolist() == lookup.split.late.tolist()
    assert lookup.split.on_time.tolist() == lookup.split.residual.tolist() == [1, 2]
    assert lookup.share.tolist() == [1.0, 1.0]


def test_numbers_of_numpy_are_numbers(tmp_path) -> None:
    record = StepRecord.with_unknown(
        step=np.int64(3), wall_s=np.float64(0.1), gpu_busy_s=np.float32(0.5), loads=np.int64(2)
    )
    with CallLogWriter(tmp_path / "c", HEADER) as writer:
        writer.write(StepEnded(record, None, Knobs(np.float64(0.3), None, None)))
        writer.write(Committed((np.int64(4),)))
    _, (end, commit) = read_call_log(tmp_path / "c")
    assert (end.record.step, end.record.wall_s, end.record.gpu_busy_s) == (3, 0.1, 0.5)
    assert (end.record.loads, end.record.phase) == (2, "decode")
    assert isnan(end.record.cpu_busy_s)
    assert astuple(end.knobs) == (0.3, None, None)
    assert commit.swap_ids == (4,)


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(),
        Knobs(0.5, 3, 0.75),
        Knobs(1.0, (3, 0, 7), (0.1, 0.2, 0.3)),
        Knobs(1.0, (3,), 0.75),  # one layer is not the same as one for all
        Knobs(1.0, 3, (0.75,)),
        Knobs(1.0, None, (1 / 3, np.float64(2 / 3))),
        Knobs(1.0, (np.int64(4), 5), None),
    ],
)
def test_knobs_of_all_layers_and_of_each(tmp_path, knobs: Knobs) -> None:
    with CallLogWriter(tmp_path / "c", HEADER) as writer:
        writer.write(StepEnded(StepRecord.with_unknown(step=1), None, knobs))
    _, (end,) = read_call_log(tmp_path / "c")
    assert end.knobs == knobs
    assert hash(end.knobs) == hash(knobs)  # tuples again, not lists
    assert end.layers is None
    for value in (end.knobs.max_swaps, end.knobs.decay):
        for number in value if isinstance(value, tuple) else (value,):
            assert number is None or type(number) in (int, float)


def test_waits_of_each_layer(tmp_path) -> None:
    io, cpu_s = np.array([True, False, True]), np.array([0.0, 1 / 3, 2e-9])
    told = StepEnded(StepRecord.with_unknown(step=1), LayerWaits(io, cpu_s), Knobs())
    without = StepEnded(StepRecord.with_unknown(step=2), None, Knobs())
    with CallLogWriter(tmp_path / "c", HEADER) as writer:
        writer.write(told)
        io[:], cpu_s[:] = False, 9.0  # a driver may reuse its arrays
        writer.write(without)
    _, (first, second) = read_call_log(tmp_path / "c")
    assert first.layers.io.dtype == np.bool_
    assert first.layers.io.tolist() == [True, False, True]
    assert first.layers.cpu_s.tolist() == [0.0, 1 / 3, 2e-9]
    assert second.layers is None


def test_a_restored_cancel_is_replayed_as_one(tmp_path) -> None:
    """What was evicted comes back only where the log says so."""
    cache = Run(8, [2], [], "serial", "predicted", warm=[[0, 1]]).cache("topk")
    with CallLogWriter(tmp_path / "c", call_log_header(cache, {})) as writer:
        cache.journal = writer.write
        first, second = (cache.plan(0, ids)[0] for ids in ([0, 5], [5, 6]))
        cache.cancel(first.id, restore=False)
        cache.cancel(second.id, restore=True)
        cache.lookup(0, [0, 1, 5, 6])
    header, events = read_call_log(tmp_path / "c")
    assert [e.restored for e in events if isinstance(e, Cancelled)] == [False, True]
    again = Run(8, [2], [], "serial", "predicted").policy("topk")
    again_cache = rebuild(header, again, Fixed())
    assert replay(events, again_cache).differences == []
    assert (again_cache.state == cache.state).all()
    assert (again_cache.slot_of == cache.slot_of).all()
    forgotten = [Cancelled(e.swap_id, False) if isinstance(e, Cancelled) else e for e in events]
    fresh_policy = Run(8, [2], [], "serial", "predicted").policy("topk")
    found = replay(forgotten, rebuild(header, fresh_policy, Fixed())).differences
    assert any(d.what.startswith("lookup of layer 0") for d in found)


def test_the_header_rebuilds_the_cache(tmp_path) -> None:
    run = busy("after", "active", pinned=[[23], [], []], warm=[[3, 0], [2], []])
    cache = run.cache("lru")
    header = json.loads(json.dumps(call_log_header(cache, {"seed": 1})))
    again = rebuild(header, Lru(3, 24), Fixed())
    assert (again.state == cache.state).all()
    assert (again.slot_of == cache.slot_of).all()
    assert again.capacity == cache.capacity == [9, 7, 0]
    assert (again.swap_neurons, again.observes, again.plans_after) == (2, "active", True)
    ahead = busy("serial", "predicted").cache("tam")
    again = rebuild(call_log_header(ahead, {}), Tam(3, 24), Fixed())
    assert (again.observes, again.plans_after) == ("predicted", False)


def test_an_empty_log(tmp_path) -> None:
    CallLogWriter(tmp_path / "c", HEADER).close()
    header, events = read_call_log(tmp_path / "c")
    assert (header["n_neurons"], events) == (8, [])
    result = replay(events, fresh())
    assert (result.differences, result.plans, result.hits) == ([], 0, 0)


def test_a_log_needs_its_header(tmp_path) -> None:
    with pytest.raises(KairoxError, match=r"\['slots', 'settings'\] missing"):
        CallLogWriter(tmp_path / "c", {"n_layers": 1, "n_neurons": 8})
    with pytest.raises(KairoxError, match="events_per_batch must be 1 or more"):
        CallLogWriter(tmp_path / "c", HEADER, events_per_batch=0)


def test_a_closed_log_takes_no_more(tmp_path) -> None:
    writer = CallLogWriter(tmp_path / "c", HEADER)
    writer.close()
    writer.close()
    with pytest.raises(KairoxError, match="is closed"):
        writer.write(Cancelled(0, False))


def test_an_aborted_run_leaves_a_cut_log_with_all_its_calls(tmp_path) -> None:
    path = tmp_path / "c"

    def abort() -> None:
        with CallLogWriter(path, HEADER) as writer:
            for event in small_log():
                writer.write(event)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        abort()
    with pytest.raises(KairoxError, match=r"was cut at byte offset \d+, after 6 whole calls"):
        read_call_log(path)
    _, events = read_call_log(path, allow_cut=True)
    assert plain(events) == plain(small_log())


def test_what_is_flushed_survives_a_killed_process(tmp_path) -> None:
    writer = CallLogWriter(tmp_path / "c", HEADER, events_per_batch=4)
    for event in small_log():
        writer.write(event)
    _, events = read_call_log(tmp_path / "c", allow_cut=True)  # nothing closed it
    assert plain(events) == plain(small_log()[:4])
    writer.close()
    assert len(read_call_log(tmp_path / "c")[1]) == 6


def test_a_log_cut_at_any_byte_is_refused_or_gives_whole_batches(tmp_path) -> None:
    path = tmp_path / "c"
    batches = [0, 2, 4, 6]
    with CallLogWriter(path, HEADER, events_per_batch=2) as writer:
        for event in small_log():
            writer.write(event)
    whole, told = path.read_bytes(), plain(small_log())
    start = whole.index(b"kairox.batch")
    met = set()
    for cut in (*range(start, len(whole), 149), len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(KairoxError, match="was cut"):
            read_call_log(path)
        _, events = read_call_log(path, allow_cut=True)
        assert plain(events) == told[: len(events)]
        met.add(len(events))
    assert met == set(batches)
    path.write_bytes(whole[: len(whole) - 300] + bytes(300))  # a power cut leaves NULs
    assert len(read_call_log(path, allow_cut=True)[1]) == 4
    for cut in (0, 1, 8, 100):
        path.write_bytes(whole[:cut])
        with pytest.raises(KairoxError, match="is not a call log"):
            read_call_log(path, allow_cut=True)


def test_damage_is_never_read(tmp_path) -> None:
    """One bit flipped anywhere behind the header: an error, or (in padding) the same events."""
    path = tmp_path / "c"
    with CallLogWriter(path, HEADER, events_per_batch=3) as writer:
        for event in small_log():
            writer.write(event)
    whole, told = path.read_bytes(), plain(small_log())
    start = whole.index(b"kairox.batch")
    refused = 0
    for at in range(start, len(whole), 61):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            _, events = read_call_log(path)
        except KairoxError:
            refused += 1
        else:
            assert plain(events) == told
    assert refused > 50


def test_a_batch_that_is_missing_or_repeated_is_damage(tmp_path) -> None:
    path = tmp_path / "c"
    with CallLogWriter(path, HEADER, events_per_batch=2) as writer:
        for event in small_log():
            writer.write(event)
    with path.open("rb") as file:
        reader = ipc.open_stream(file)
        batches = [reader.read_next_batch_with_custom_metadata() for _ in range(3)]
    for order in ([0, 2], [0, 0, 1, 2], [1, 0, 2]):
        with ipc.new_stream(path, reader.schema) as out:
            for i in order:
                out.write_batch(batches[i][0], custom_metadata=batches[i][1])
        with pytest.raises(KairoxError, match=r"damaged at byte offset .*: batch \d was due"):
            read_call_log(path)


def test_two_logs_in_one_file_are_damage(tmp_path) -> None:
    path = tmp_path / "c"
    with CallLogWriter(path, HEADER) as writer:
        writer.write(small_log()[0])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(KairoxError, match="it ends, and yet goes on"):
        read_call_log(path, allow_cut=True)


def test_other_files_are_refused(tmp_path) -> None:
    path = tmp_path / "c"
    with pytest.raises(KairoxError, match="cannot read the call log"):
        read_call_log(path)
    path.write_bytes(b"seq,step\n1,2\n" * 100)
    with pytest.raises(KairoxError, match="is not a call log"):
        read_call_log(path)
    with ipc.new_stream(path, pa.schema([("seq", pa.int64())])):
        pass
    with pytest.raises(KairoxError, match="an Arrow stream but not a call log"):
        read_call_log(path)
    for key, text, says in (
        (b"kairox.calls.crc32", b"0", "header does not match its checksum"),
        (b"kairox.calls", b'{"format_version": 2}', "checksum"),
    ):
        with CallLogWriter(path, HEADER):
            pass
        with path.open("rb") as file:
            schema = ipc.open_stream(file).schema
        with ipc.new_stream(path, schema.with_metadata(schema.metadata | {key: text})):
            pass
        with pytest.raises(KairoxError, match=says):
            read_call_log(path)


def test_a_later_version_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kairox_sim.calllog.FORMAT_VERSION", 2)
    CallLogWriter(tmp_path / "c", HEADER).close()
    monkeypatch.undo()
    with pytest.raises(KairoxError, match="of version 2; this Kairox reads version 1"):
        read_call_log(tmp_path / "c")


def test_other_tools_read_it_without_this_package(tmp_path) -> None:
    path, told = logged(tmp_path, "lru", busy("after", "active"))
    with path.open("rb") as file:
        calls_table = ipc.open_stream(file).read_all()
    frame = calls_table.to_pandas()
    assert len(frame) == len(told)
    calls = duckdb.sql("select kind, count(*) from calls_table group by kind")
    assert dict(calls.fetchall()) == frame["kind"].value_counts().to_dict()
    loads = duckdb.sql("select sum(record.loads) from calls_table where kind = 'end_step'")
    total = sum(e.record.loads for e in told if isinstance(e, StepEnded))
    assert loads.fetchall() == [(total,)]
    assert total > 0
    lookups = polars.from_arrow(calls_table).filter(polars.col("kind") == "lookup")
    assert lookups["on_time"].list.len().sum() == sum(
        e.split.on_time.size for e in told if isinstance(e, LookedUp)
    )
