"""What a predictor learns from or is judged on: texts that the model still has to read, or a
recording of `kairox record --hidden`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kairox_exec.hidden_states import TRIGGERS, HiddenStates, read_hidden_states
from kairox_exec.loading import model_sha256
from kairox_exec.plain_run import record_plain_run
from kairox_exec.text import encode_file, load_tokenizer
from kairox_sim.errors import KairoxError
from kairox_sim.trace import Trace, read_trace

WINDOW = 256  # tokens of a sequence, at most

Span = tuple[str, tuple[str, int, int]]
"""(name of a text, (its sha256, first token, token after the last))"""

Progress = Callable[[int, int], None]
"""(tokens done, of how many)"""


@dataclass(frozen=True, slots=True)
class Texts:
    """Tokens [skip, skip + tokens) of each file, read by the model as transformers runs it.

    thresholds: a file of `kairox sparsify`.
    """

    model_dir: Path
    files: tuple[Path, ...]
    tokens: int
    skip: int = 0
    thresholds: Path | None = None

    def spans(self) -> list[Span]:
        """Which tokens; KairoxError where a text has too few, before the model is loaded."""
        if self.tokens < 1 or self.skip < 0:
            raise KairoxError(
                f"tokens {self.tokens}, skip {self.skip}: tokens must be 1 or more, skip 0 or more"
            )
        tokenizer = load_tokenizer(self.model_dir)
        found, stop = [], self.skip + self.tokens
        for file in self.files:
            text = encode_file(file, tokenizer)
            if len(text.token_ids) < stop:
                raise KairoxError(
                    f"{file} has {len(text.token_ids)} tokens and {self.tokens} after the first "
                    f"{self.skip} were asked for; give a longer text, fewer tokens or a smaller "
                    "skip"
                )
            found.append((str(file), (text.source.sha256, self.skip, stop)))
        return found

    def read(
        self, trigger: str | None = None, progress: Progress | None = None
    ) -> tuple[Trace, HiddenStates]:
        """Run the model and keep the states of `trigger`, attn_out by default."""
        self.spans()
        trigger = _known(trigger) or TRIGGERS[0]
        # Windows of nearly one length, all but the last token of each a prefill, which is quick.
        n_windows = -(-self.tokens // WINDOW)
        window = -(-self.tokens // n_windows)
        with tempfile.TemporaryDirectory() as folder:
            states = Path(folder) / "states"
            path = record_plain_run(
                self.model_dir,
                self.files,
                Path(folder) / "trace.arrow",
                tokens=self.tokens,
                skip=self.skip,
                window=window,
                prefill=(self.tokens % window or window) - 1,
                trigger=trigger,
                thresholds=self.thresholds,
                hidden=states,
                progress=progress,
            )
            return read_trace(path, strict=True), read_hidden_states(states)


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace and the hidden states beside it. With model_dir: refused if of another model."""

    trace: Path
    hidden: Path
    model_dir: Path | None = None

    def spans(self) -> list[Span]:
        """Which tokens."""
        sequences = read_trace(self.trace).header.sequences
        return [(s.source, (s.source_sha256, s.token_start, s.token_stop)) for s in sequences]

    def read(
        self, trigger: str | None = None, progress: Progress | None = None
    ) -> tuple[Trace, HiddenStates]:
        """KairoxError where it is cut, or of another model or trigger.

        A recording that Ctrl-C ended is whole as far as it goes: both files have its first steps.
        """
        trigger = _known(trigger)
        trace, hidden = read_trace(self.trace), read_hidden_states(self.hidden)
        stopped = trace.header.truncated_at is not None and hidden.n_tokens >= trace.n_tokens
        if trace.truncated_at is not None and not stopped:
            raise KairoxError(
                f"{self.trace} was cut after {trace.truncated_at} tokens and {self.hidden} after "
                f"{hidden.n_tokens}, by more than Ctrl-C; record again, fewer tokens if need be"
            )
        hidden = hidden.first(trace.n_tokens) if stopped else hidden
        header = hidden.header
        if self.model_dir is not None and header.model_sha256 != model_sha256(self.model_dir):
            raise KairoxError(
                f"{self.hidden} is of {header.model!r} with weights {header.model_sha256[:12]} and "
                f"{self.model_dir} has others; record this model"
            )
        if trigger not in (None, header.trigger):
            raise KairoxError(
                f"{self.hidden} holds the states of trigger {header.trigger!r}, not of "
                f"{trigger!r}; record with --trigger {trigger}"
            )
        return trace, hidden


def _known(trigger: str | None) -> str | None:
    if trigger not in (None, *TRIGGERS):
        raise KairoxError(f"unknown trigger {trigger!r}; a predictor's are {', '.join(TRIGGERS)}")
    return trigger
