"""A device made of host memory that does its work late, in any order that CUDA would allow.

Inside `LateDevice` torch's own ops on its tensors are queued on the current stream, as on a card:
shapes and memory are there at once, contents when the stream gets to them. What reads a result
(`.cpu()`, `.numpy(force=True)`, `.item()`) lets its stream finish first. Memory that was freed or
not yet written holds NaN, so that reading too early, or a buffer used again too early, shows.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

PRETENDED = torch.device("meta")
ops = torch.ops.aten
TO_HOST = {ops._local_scalar_dense.default, ops.equal.default, ops.nonzero.default}
# On a card, other ops want all their tensors there, but for single numbers.
MIXES = {
    ops._to_copy.default, ops.copy_.default, ops.index.Tensor, ops.index_put.default,
    ops.index_put_.default,
}  # fmt: skip
SHARES = {ops._unsafe_view.default, ops.detach.default, ops.alias.default}


class Late(torch.Tensor):
    """A tensor of the device: `memory` is where it lies."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> Late:
        late = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device=PRETENDED,
        )  # fmt: skip
        late.memory = real
        return late

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the device, outside of it")

    def numpy(self, *, force: bool = False) -> Any:
        assert force, "device memory"
        return self.cpu().numpy()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Late({tuple(self.shape)}, {self.dtype})"


class LateEvent:
    def __init__(self, device: LateDevice, of: str) -> None:
        self._device, self._of, self.at_ns = device, of, 0

    @property
    def done(self) -> bool:
        return self.at_ns > 0

    def query(self) -> bool:
        self._device.may_go_on()
        return self.done or (self._device.without == "query" and self._of == "promotion")

    def synchronize(self) -> None:
        if self._device.without != "synchronize":
            self._device.finish(self)


class LateStream:
    def __init__(self, device: LateDevice, name: str) -> None:
        self._device, self.name = device, name
        self.queue: deque[Any] = deque()  # callables, and (event, "record" | "wait")

    def run(self, work: Callable[[], None]) -> None:
        before, self._device.current = self._device.current, self
        try:
            work()
        finally:
            self._device.current = before

    def record(self) -> LateEvent:
        event = LateEvent(self._device, self.name)
        self.put((event, "record"))
        return event

    def wait(self, event: Any) -> None:
        if self._device.without != f"{self.name} waits":
            self.put((event, "wait"))

    def put(self, item: Any) -> None:
        with self._device.lock:
            self.queue.append(item)
        self._device.may_go_on()

    def is_blocked(self) -> bool:
        if self.name == self._device.stuck:
            return True
        item = self.queue[0]
        return isinstance(item, tuple) and item[1] == "wait" and not item[0].done


class LateDevice(TorchDispatchMode):
    """Streams for `CudaDevice`; a context manager, entered by the thread that runs the model.

    seed: of the order. without: leave out a guard (sabotage): "<stream> waits", "query" of swaps,
    "synchronize", or "ring", where every pinned buffer is the same one. stuck: the name of a stream
    that does nothing. refuse: why pages cannot be locked.
    """

    def __init__(
        self, seed: int = 0, *, without: str = "", stuck: str = "", refuse: str = ""
    ) -> None:
        super().__init__()
        self.lock, self._rng = threading.RLock(), random.Random(seed)
        self.without, self.stuck, self.refuse = without, stuck, refuse
        self.device = PRETENDED
        # How eagerly each stream goes on by itself, drawn anew for every order.
        self.compute, self.critical, self.promotion = (
            LateStream(self, name) for name in ("compute", "critical", "promotion")
        )
        self._eager = {
            s.name: self._rng.choice((0, 0.1, 0.5, 0.9))
            for s in (self.compute, self.critical, self.promotion)
        }
        self.current = self.compute
        self.locked: list[int] = []
        self._pinned: list[torch.Tensor] = []
        self._now_ns = 0

    # -- streams.Streams ------------------------------------------------------------------------

    def pinned(self, n_bytes: int) -> torch.Tensor:
        if self.without == "ring" and self._pinned:
            return torch.frombuffer(self._pinned[0].numpy(), dtype=torch.uint8)[:n_bytes]
        size = 1 << 16 if self.without == "ring" else n_bytes
        memory = torch.full((size,), 0xFF, dtype=torch.uint8)
        self._pinned.append(memory)
        return memory[:n_bytes]

    def lock_pages(self, rows: torch.Tensor) -> str:
        if not self.refuse:
            self.locked.append(rows.data_ptr())
        return self.refuse

    def unlock_pages(self, rows: torch.Tensor) -> None:
        self.locked.remove(rows.data_ptr())

    def ns_between(self, earlier: Any, later: Any) -> int:
        assert self.without or (earlier.done and later.done)
        return int(later.at_ns - earlier.at_ns)

    def pause(self) -> None:
        self._step()

    def free_bytes(self) -> int | None:
        return 1000

    # -- the order ------------------------------------------------------------------------------

    def may_go_on(self) -> None:
        with self.lock:
            for stream in (self.compute, self.critical, self.promotion):
                while self._rng.random() < self._eager[stream.name] and self._step(stream):
                    pass

    def finish(self, event: LateEvent) -> None:
        with self.lock:
            while not event.done:
                assert self._step(), "deadlock: nothing that was queued can run"

    def _step(self, stream: LateStream | None = None) -> bool:
        """Run the next piece of a stream, by default of any; whether there was one."""
        with self.lock:
            every = (self.compute, self.critical, self.promotion) if stream is None else (stream,)
            able = [s for s in every if s.queue and not s.is_blocked()]
            if not able:
                return False
            weights = [0.02 + self._eager[s.name] for s in able]
            item = self._rng.choices(able, weights)[0].queue.popleft()
            self._now_ns += 1
            if not isinstance(item, tuple):
                item()
            elif item[1] == "record":
                item[0].at_ns = self._now_ns
            return True

    # -- torch's ops ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is queued may be done in another mode, where inference tensors cannot be written.
        with torch.inference_mode(False), torch.no_grad():
            return self._op(func, args, dict(kwargs or {}))

    def _op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        flat = [t for v in given for t in (v if isinstance(v, (list, tuple)) else (v,))]
        here = any(isinstance(t, Late) for t in flat)
        goes_to = kwargs.get("device")
        if not here and goes_to != PRETENDED:
            return func(*args, **kwargs)
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        if here and func not in MIXES:
            host = [t for t in flat if torch.is_tensor(t) and t.device.type == "cpu" and t.dim()]
            assert not host, f"{func} of the device's memory and the host's"
        if func is ops._to_copy.default:
            return self._to_copy(args[0], **kwargs)
        if func is ops.copy_.default:
            return self._copy(*args, **kwargs)
        if func in TO_HOST:
            self._drain()
            return func(*_real(args), **_real(kwargs))
        if func in SHARES or _is_view(func):
            return _late(func(*_real(args), **_real(kwargs)))
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            reals, named = _snapshot(args), _snapshot(kwargs)
            self.current.put(lambda: func(*reals, **named))
            return kwargs.get("out", args[0])
        if goes_to == PRETENDED:
            kwargs["device"] = torch.device("cpu")
            made = func(*_real(args), **_real(kwargs))
            return Late(_poison(torch.empty_like(made))) if "empty" in str(func) else Late(made)
        reals, named = _snapshot(args), _snapshot(kwargs)
        shapes = func(*tree_map(_meta, reals), **tree_map(_meta, named))
        outs = tree_map(_room, shapes)

        def compute() -> None:
            found = func(*reals, **named)
            pairs = zip(outs, found, strict=True) if isinstance(outs, tuple) else [(outs, found)]
            for out, one in pairs:
                out.copy_(one)

        self.current.put(compute)
        return _late(outs)

    def _to_copy(self, source: torch.Tensor, **how: Any) -> torch.Tensor:
        how.pop("non_blocking", None)
        how.pop("pin_memory", None)
        device = how.pop("device", source.device)
        dtype = how.pop("dtype", None) or source.dtype
        if torch.device(device) != PRETENDED:
            assert isinstance(source, Late)
            self._drain()
            return source.memory.to(dtype, copy=True)
        held = source.memory if isinstance(source, Late) else self._as_sent(source)
        out = _poison(torch.empty(source.shape, dtype=dtype))
        self.current.put(lambda: out.copy_(held))
        return Late(out)

    def _copy(
        self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        real_to = to.memory if isinstance(to, Late) else to
        held = source.memory if isinstance(source, Late) else self._as_sent(source)
        self.current.put(lambda: real_to.copy_(held))
        if not isinstance(to, Late) and not non_blocking:
            self._drain()
        return to

    def _as_sent(self, source: torch.Tensor) -> torch.Tensor:
        """Pinned memory is read when the copy runs, other host memory before the call returns."""
        at = source.data_ptr()
        pinned = at in self.locked or any(
            p.data_ptr() <= at < p.data_ptr() + p.numel() for p in self._pinned
        )
        return source if pinned else source.clone()

    def _drain(self) -> None:
        self.finish(self.current.record())


def _is_made_of_others(func: Any) -> bool:
    """Ops that inference mode does not take apart before they come here."""
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd"))


def _is_view(func: Any) -> bool:
    infos = [r.alias_info for r in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _real(value: Any) -> Any:
    return tree_map(lambda t: t.memory if isinstance(t, Late) else t, value)


def _snapshot(value: Any) -> Any:
    """Host tensors of no dimension are read when the op is launched; a card takes no others."""
    return tree_map(_as_launched, value)


def _as_launched(given: Any) -> Any:
    if isinstance(given, Late):
        return given.memory
    if not torch.is_tensor(given):
        return given
    if given.device == PRETENDED:  # `torch.tensor([], device=...)` passes no mode
        assert given.numel() == 0
        return torch.empty(given.shape, dtype=given.dtype)
    assert given.ndim == 0, f"host memory {tuple(given.shape)} given to an op of the device"
    return given.clone()


def _meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if torch.is_tensor(value) else value


def _room(shape: Any) -> Any:
    if not torch.is_tensor(shape):
        return shape
    return _poison(torch.empty(shape.shape, dtype=shape.dtype))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """NaN for floats, -1 for integers, True for bools."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)


def _late(value: Any) -> Any:
    return tree_map(lambda t: Late(t) if torch.is_tensor(t) else t, value)
