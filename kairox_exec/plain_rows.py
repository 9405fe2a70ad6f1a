"""Forward passes of a plain model as rows of a trace: what is padding, who has ended."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.text import Tokenizer
from kairox_sim.errors import KairoxError
from kairox_sim.trace_format import SequenceInfo, TraceHeader, pack
from kairox_sim.trace_writer import TraceWriter

STEPS_PER_BATCH = 256  # at most, where a batch of rows is large


class Forward(NamedTuple):  # a frozen dataclass takes several times as long to make
    """One forward pass, in host memory once every event of `ready` has passed."""

    seqs: tuple[int, ...]  # of the rows
    past: int  # columns that the KV cache held before
    cached: bool  # it has one
    phase: str
    ids: torch.Tensor  # [n_rows, n_columns]
    real: torch.Tensor | None  # bool, the same shape; None: nothing is padding
    # By layer, bool [n_rows, n_columns, n_neurons] or packed uint8 [n_rows, n_columns, n_bytes]; or
    # one tensor of all layers, packed. Rows and columns may be one dimension.
    fired: Sequence[torch.Tensor]
    ready: Sequence[torch.cuda.Event]


class PassWriter:
    """Writes them, on whatever thread calls `write`."""

    def __init__(
        self, path: Path, header: TraceHeader, tokenizer: Tokenizer, stop: Sequence[int]
    ) -> None:
        self.n_steps = self.n_tokens = 0
        self._header, self._tokenizer, self._stop = header, tokenizer, frozenset(stop)
        # Batches are what `write` is given; the thread that calls it is woken for a number of them.
        self._writer = TraceWriter(path, header, steps_per_batch=STEPS_PER_BATCH)
        self._ended: set[int] = set()  # rows of batches that met a stop token
        self._prompts: dict[int, tuple[int, list[int]]] = {}  # by sequence: first token, prompt
        self._decoded: set[int] = set()
        self._fired = np.zeros(header.n_layers, bool)
        self._uncached: NDArray[np.int64] | None = None  # the latest pass without a cache

    def write(self, forwards: Sequence[Forward]) -> None:
        """Into the file, as one batch. KairoxError where a whole text is fed again for each of its
        tokens."""
        for forward in forwards:
            for event in forward.ready:
                event.synchronize()
        for forward, bits in zip(forwards, self._packed(forwards), strict=True):
            ids = forward.ids.numpy()
            self._refuse_refeeding(forward, ids)
            for row, seq in enumerate(forward.seqs):
                self._write_row(seq, forward, row, ids[row], bits[:, row])
        self._writer.flush()

    def _write_row(
        self,
        seq: int,
        forward: Forward,
        row: int,
        ids: NDArray[np.int64],
        bits: NDArray[np.uint8],
    ) -> None:
        if forward.real is not None:
            real = forward.real[row].numpy()
            if not real.all():
                ids, bits = ids[real], bits[:, real]
        if len(forward.seqs) > 1 and self._has_ended(seq, forward, ids):
            return
        if ids.size == 0:
            return
        self._note(seq, forward, ids)
        self._writer.append_step(
            seq=seq, step=self.n_steps, phase=forward.phase, tokens=ids, active=bits
        )
        self.n_steps += 1
        self.n_tokens += len(ids)

    def _packed(self, forwards: Sequence[Forward]) -> Iterator[NDArray[np.uint8]]:
        """uint8 [n_layers, n_rows, n_columns, n_bytes] of each pass; passes alike are packed
        together."""
        n_layers, n_bytes = self._header.n_layers, self._header.n_bytes
        for (shape, dtype, _), alike in groupby(forwards, key=_kind):
            group = list(alike)
            fired = torch.stack([part for forward in group for part in forward.fired]).numpy()
            bits = pack(fired) if dtype == torch.bool else fired
            bits = bits.reshape(len(group), n_layers, *shape, n_bytes)
            self._fired |= bits.any(axis=(0, 2, 3, 4))
            yield from bits

    def sequences(self) -> tuple[SequenceInfo, ...]:
        """What was fed: prompts are named by the hash of their text, and begin behind a prefix that
        was cached before."""
        found = []
        for info in self._header.sequences:
            if info.seq not in self._prompts:
                continue
            start, prompt = self._prompts[info.seq]
            text = str(self._tokenizer.fast.decode(prompt, skip_special_tokens=True))
            found.append(
                replace(
                    info,
                    source_sha256=hashlib.sha256(text.encode()).hexdigest(),
                    token_start=start,
                    token_stop=start + len(prompt),
                    generated=info.seq in self._decoded,
                )
            )
        return tuple(found)

    def warn_of_silent_layers(self) -> None:
        """A layer that never fired is more often a hook in a wrong place than a finding."""
        silent = np.flatnonzero(~self._fired).tolist()
        if silent:
            warnings.warn(
                f"layers that never fired: {', '.join(map(str, silent))}; is the model "
                "loaded whole?",
                stacklevel=3,
            )

    def close(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        self._writer.abandon()

    def _has_ended(self, seq: int, forward: Forward, tokens: NDArray[np.int64]) -> bool:
        """generate() goes on feeding rows that have ended, until the last one of a batch has."""
        if forward.phase == "decode" and tokens.size and int(tokens[0]) in self._stop:
            self._ended.add(seq)
        return seq in self._ended

    def _note(self, seq: int, forward: Forward, tokens: NDArray[np.int64]) -> None:
        if forward.phase == "decode":
            self._decoded.add(seq)
        elif seq not in self._decoded:
            self._prompts.setdefault(seq, (forward.past, []))[1].extend(tokens.tolist())
        self._prompts.setdefault(seq, (forward.past, []))

    def _refuse_refeeding(self, forward: Forward, ids: NDArray[np.int64]) -> None:
        before = self._uncached
        self._uncached = None if forward.cached else ids
        if forward.cached or before is None or ids.shape[0] != before.shape[0]:
            return
        if ids.shape[1] == before.shape[1] + 1 and (ids[:, :-1] == before).all():
            raise KairoxError(
                "the whole text is fed again for every token, without a KV cache, so that its "
                "tokens would be recorded many times; run with use_cache=True"
            )


def _kind(forward: Forward) -> tuple[torch.Size, torch.dtype, int]:
    """Alike are passes of the same shape whose sets came in the same form."""
    return forward.ids.shape, forward.fired[0].dtype, len(forward.fired)
