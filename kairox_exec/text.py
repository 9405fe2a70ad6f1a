"""Text in, token ids out: the tokenizer, windows of forced tokens, and prompts files.

Offsets count tokens of the whole file, encoded at once and without special tokens, so that the same
offset is the same token whatever part of the file is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kairox_sim.errors import KairoxError

JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The model directory's tokenizer.json."""

    fast: Any  # tokenizers.Tokenizer
    sha256: str  # of tokenizer.json

    @property
    def n_vocab(self) -> int:
        return int(self.fast.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special_tokens: bool = False) -> npt.NDArray[np.int32]:
        """int32 [n_tokens]. `special_tokens` adds what the tokenizer puts around a prompt."""
        try:
            ids = self.fast.encode(text, add_special_tokens=special_tokens).ids
        except Exception as error:  # tokenizers raises nothing narrower
            raise KairoxError(
                f"the tokenizer cannot encode the text: {error}; use the tokenizer.json that came "
                "with the model, and text that is valid UTF-8"
            ) from error
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        return str(self.fast.decode([int(t) for t in token_ids], skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Source:
    """A text file, as a trace header names it: file name (no directory) and hash of its bytes."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class EncodedText:
    source: Source
    domain: str  # the file's name without its suffix
    token_ids: npt.NDArray[np.int32]  # [n_tokens], the whole file


@dataclass(frozen=True, slots=True)
class Window:
    """One sequence: a prefill, then decode steps that are each fed the file's own next token."""

    prefill: npt.NDArray[np.int32]
    decode: npt.NDArray[np.int32]
    token_start: int  # offsets in the file's tokens, stop exclusive
    token_stop: int


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    domain: str
    source: Source


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """The tokenizer of a model directory. Local files only."""
    import tokenizers

    path = Path(model_dir) / "tokenizer.json"
    if not path.parent.is_dir():
        raise KairoxError(
            f"there is no folder {str(path.parent)!r}: a model is a local Hugging Face directory "
            "with config.json, *.safetensors and tokenizer.json; nothing is downloaded"
        )
    if not path.is_file():
        raise KairoxError(
            f"{path} does not exist. Only tokenizer.json is read; make one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    content = path.read_bytes()
    try:
        fast = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise KairoxError(f"{path} is not a tokenizer: {error}") from error
    # Set in some files for training; here it would silently cut or pad what a user gave.
    fast.no_truncation()
    fast.no_padding()
    return Tokenizer(fast, hashlib.sha256(content).hexdigest())


def checked_tokens(
    given: Sequence[int] | npt.NDArray[np.int32], config: Any
) -> npt.NDArray[np.int32]:
    """One sequence as int32 [n_tokens]; KairoxError where the model of `config` cannot take it."""
    tokens = np.asarray(given, np.int32)
    vocab, longest = int(config.vocab_size), int(config.max_position_embeddings)
    if tokens.ndim != 1 or tokens.size == 0:
        raise KairoxError(f"a sequence is a list of 1 token or more, got {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise KairoxError(
            f"tokens must be 0 to {vocab - 1}, got {tokens.min()} to {tokens.max()}; "
            "was the text encoded with another model's tokenizer?"
        )
    if tokens.size > longest:
        raise KairoxError(
            f"{tokens.size} tokens; the model's context holds {longest}: give a shorter prompt or "
            "window"
        )
    return tokens


def check_vocabulary(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise if the tokenizer can give ids that the model has no embedding for."""
    if tokenizer.n_vocab > vocab:
        raise KairoxError(
            f"the tokenizer has {tokenizer.n_vocab} tokens but the model's vocabulary has {vocab}: "
            "they do not belong together"
        )


def encode_file(path: str | Path, tokenizer: Tokenizer) -> EncodedText:
    """A text file's tokens; its domain is the file's name."""
    path = Path(path)
    text, source = read_text(path)
    return EncodedText(source, path.stem, tokenizer.encode(text))


def windows(
    token_ids: npt.NDArray[np.int32],
    *,
    tokens: int = 256,
    skip: int = 0,
    prefill: int = 32,
    window: int = 256,
) -> list[Window]:
    """Cut token_ids[skip : skip + tokens] into sequences of `window` tokens (the last may be less).

    The first `prefill` tokens of each are prefilled, every other one is a decode step.
    """
    if skip < 0 or tokens < 1 or window < 1:
        raise KairoxError(
            f"tokens {tokens}, skip {skip}, window {window}: tokens and window must be at least 1, "
            "skip at least 0"
        )
    if not 0 <= prefill < window:
        raise KairoxError(
            f"prefill {prefill} must be at least 0 and below window {window}, so that every "
            "sequence has a decode step"
        )
    have = len(token_ids)
    if skip + tokens > have:
        raise KairoxError(
            f"the text has {have} tokens, but skip {skip} + tokens {tokens} needs {skip + tokens}. "
            f"Give a longer text, or at most tokens {max(have - skip, 0)} at this skip."
        )
    rest = tokens % window
    if 0 < rest <= prefill:
        raise KairoxError(
            f"tokens {tokens} leaves a last window of {rest}, which prefill {prefill} uses up. "
            f"Use tokens {tokens - rest or prefill + 1}, or a smaller prefill."
        )
    cut = []
    for start in range(skip, skip + tokens, window):
        stop = min(start + window, skip + tokens)
        middle = start + prefill
        cut.append(Window(token_ids[start:middle], token_ids[middle:stop], start, stop))
    return cut


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file.

    A .jsonl or .ndjson file holds one JSON object per line, with the strings `prompt` and `domain`;
    blank lines are skipped. Any other file is one prompt, and its domain is the file's name.
    """
    path = Path(path)
    text, source = read_text(path)
    if path.suffix.lower() not in JSON_LINES:
        return [Prompt(text, path.stem, source)]
    prompts = [
        _prompt(line, f"{path}, line {number}", source)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise KairoxError(f"{path} has no prompts: only blank lines")
    return prompts


def _prompt(line: str, where: str, source: Source) -> Prompt:
    example = 'expected an object like {"prompt": "...", "domain": "..."}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise KairoxError(f"{where}: not JSON ({error}); {example}") from error
    if not isinstance(row, dict):
        raise KairoxError(f"{where}: a JSON {type(row).__name__}; {example}")
    unknown = sorted(row.keys() - {"prompt", "domain"})
    if unknown:
        raise KairoxError(f"{where}: unknown key {', '.join(map(repr, unknown))}; {example}")
    for key in ("prompt", "domain"):
        if key not in row:
            raise KairoxError(f"{where}: no {key!r}; {example}")
        if not isinstance(row[key], str) or not row[key]:
            raise KairoxError(f"{where}: {key!r} is {row[key]!r}, not a non-empty string")
        if any("\ud800" <= character <= "\udfff" for character in row[key]):
            raise KairoxError(f"{where}: {key!r} holds half of a surrogate pair, which is no text")
    return Prompt(row["prompt"], row["domain"], source)


def read_text(path: Path) -> tuple[str, Source]:
    """A UTF-8 file, without its byte order mark. KairoxError where it is empty or not text."""
    try:
        if path.is_char_device():
            raise KairoxError(f"{path} is a device, which may never end; give a text file")
        content = path.read_bytes()
    except OSError as error:
        raise KairoxError(f"cannot read {path}: {error.strerror}") from error
    try:
        # Decoded from bytes: no newline translation, so the text is the same on every system.
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise KairoxError(
            f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8 text"
        ) from error
    if not text:
        raise KairoxError(f"{path} is empty")
    if "\0" in text:
        raise KairoxError(
            f"{path} is not text: it has {text.count(chr(0))} NUL characters, as UTF-16 and binary "
            "files do; save it as UTF-8 text"
        )
    return text, Source(path.name, hashlib.sha256(content).hexdigest())
