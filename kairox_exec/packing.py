"""Sets of neurons as bits, packed where they are computed and copied to the host beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from kairox_sim.trace_format import pack

# Times 8 bytes that are each 0 or 1, read as one little-endian number, this puts byte i's at bit
# 56 + i: the sum of 2^(56 - 7 i). All other products fall on bits of their own below 56, so that
# nothing carries, or beyond 64.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """bool [..., n] -> uint8 [..., n_bytes], as `trace_format.pack`, on the mask's device."""
    if mask.is_cpu:  # NumPy's own packing is an order of magnitude faster
        return torch.from_numpy(pack(mask.numpy()))
    return pack_by_products(mask)


def pack_by_products(mask: torch.Tensor) -> torch.Tensor:
    """As `pack_bits`, in operations that every device has."""
    padded = functional.pad(mask, (0, -mask.shape[-1] % 64)).contiguous()
    packed: torch.Tensor = (padded.view(torch.int64) * _GATHER) >> 56
    return packed.to(torch.uint8)  # its low 8 bits


class HostCopies:
    """Copies to the host that do not hold up the device; on the CPU there is nothing to copy."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: list[torch.cuda.Event] = []

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host's copy, complete once the events that `events` returns have passed."""
        if not tensor.is_cuda:
            return tensor.to("cpu")
        if tensor.device not in self._streams:
            self._streams[tensor.device] = _stream(tensor.device)
        side = self._streams[tensor.device]
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(side)  # its memory is not given away before it was read
        self._copied.append(side.record_event())
        return host

    def events(self) -> list[torch.cuda.Event]:
        """Of the copies since the last call; synchronise with all of them before reading."""
        taken, self._copied = self._copied, []
        return taken


def _stream(device: torch.device) -> torch.cuda.Stream:
    new: Any = torch.cuda.Stream  # untyped
    stream: torch.cuda.Stream = new(device)
    return stream


def masks_on_host(fired: list[torch.Tensor], copies: HostCopies) -> list[torch.Tensor]:
    """A pass's masks by layer, packed in one where a GPU has them; bits are on their way already.

    Complete once the events of `copies` have passed.
    """
    if fired[0].dtype == torch.uint8 or all([mask.is_cpu for mask in fired]):
        return fired
    where = fired[-1].device
    return [copies.take(pack_bits(torch.stack([mask.to(where) for mask in fired])))]
