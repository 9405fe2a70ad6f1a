"""Text: tokenizer, windows of forced tokens, prompts files, and what is wrong with bad ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_exec.text import (
    Prompt,
    Source,
    check_vocabulary,
    encode_file,
    load_tokenizer,
    read_prompts,
    read_text,
    windows,
)
from kairox_sim.errors import KairoxError

IDS = np.arange(1000, dtype=np.int32)


def test_tokenizer_round_trip_and_hash(tiny_reglu_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_reglu_dir)
    text = "def add(a, b):\n    return a + b\n"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert 5 < len(ids) < len(text)
    assert tokenizer.decode(ids) == text
    content = (tiny_reglu_dir / "tokenizer.json").read_bytes()
    assert tokenizer.sha256 == hashlib.sha256(content).hexdigest()
    check_vocabulary(tokenizer, tokenizer.n_vocab)
    with pytest.raises(KairoxError, match="do not belong together"):
        check_vocabulary(tokenizer, tokenizer.n_vocab - 1)


def test_encode_file_names_its_source(tiny_reglu_dir: Path, prompts_dir: Path) -> None:
    path = prompts_dir / "math.txt"
    encoded = encode_file(path, load_tokenizer(tiny_reglu_dir))
    assert encoded.domain == "math"
    assert encoded.source == Source("math.txt", hashlib.sha256(path.read_bytes()).hexdigest())
    assert load_tokenizer(tiny_reglu_dir).decode(encoded.token_ids) == path.read_text("utf-8")
    assert encoded.token_ids.max() < 1024


def test_newlines_are_kept_as_they_are(tiny_reglu_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    tokenizer = load_tokenizer(tiny_reglu_dir)
    assert tokenizer.decode(encode_file(tmp_path / "dos.txt", tokenizer).token_ids) == (
        "one\r\ntwo\r\n"
    )


def test_windows_by_hand() -> None:
    first, second = windows(IDS, tokens=14, skip=100, prefill=3, window=10)
    assert (first.token_start, first.token_stop) == (100, 110)
    assert first.prefill.tolist() == [100, 101, 102]
    assert first.decode.tolist() == list(range(103, 110))
    assert (second.token_start, second.token_stop) == (110, 114)
    assert second.prefill.tolist() == [110, 111, 112]
    assert second.decode.tolist() == [113]


def test_default_window_is_one_sequence() -> None:
    (only,) = windows(IDS)
    assert (only.token_start, only.token_stop) == (0, 256)
    assert (len(only.prefill), len(only.decode)) == (32, 224)


@given(
    tokens=st.integers(1, 500),
    skip=st.integers(0, 500),
    prefill=st.integers(0, 60),
    window=st.integers(1, 120),
)
def test_windows_are_the_span_once_in_order(
    tokens: int, skip: int, prefill: int, window: int
) -> None:
    try:
        cut = windows(IDS, tokens=tokens, skip=skip, prefill=prefill, window=window)
    except KairoxError:
        assert prefill >= window or 0 < tokens % window <= prefill
        return
    fed = np.concatenate([np.concatenate([w.prefill, w.decode]) for w in cut])
    assert fed.tolist() == list(range(skip, skip + tokens))
    for w in cut:
        assert len(w.prefill) == prefill
        assert len(w.decode) >= 1
        assert w.token_stop - w.token_start == len(w.prefill) + len(w.decode) <= window


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"tokens": 900, "skip": 200}, r"has 1000 tokens.*needs 1100.*at most tokens 800"),
        ({"tokens": 1, "skip": 1000, "prefill": 0}, "at most tokens 0"),
        ({"prefill": 256}, "prefill 256 must be .* below window 256"),
        ({"prefill": -1}, "prefill -1"),
        ({"tokens": 0}, "tokens 0"),
        ({"skip": -5}, "skip -5"),
        ({"tokens": 270}, "last window of 14.*Use tokens 256"),
        ({"tokens": 20}, "last window of 20.*Use tokens 33"),
    ],
)
def test_windows_refuses(kwargs: dict[str, int], words: str) -> None:
    with pytest.raises(KairoxError, match=words):
        windows(IDS, **kwargs)


def test_plain_text_is_one_prompt(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_bytes(b'{"looks": "like json"}\nbut is text\n')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_prompts(path) == [
        Prompt('{"looks": "like json"}\nbut is text\n', "poem", Source("poem.txt", digest))
    ]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    # U+2028 separates lines for str.splitlines but not in JSON Lines.
    path.write_text(
        '{"prompt": "a \u2028 b", "domain": "x"}\r\n\n{"domain": "y", "prompt": "c\\nd"}\n',
        encoding="utf-8",
        newline="",
    )
    assert [(p.text, p.domain) for p in read_prompts(path)] == [("a \u2028 b", "x"), ("c\nd", "y")]


GOOD = '{"prompt": "a", "domain": "x"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD + "\n" + "{oops\n", "line 3: not JSON"),
        (GOOD + '["a", "b"]\n', "line 2: a JSON list"),
        (GOOD + '{"prompt": "a"}\n', "line 2: no 'domain'"),
        ('{"domain": "a"}\n', "line 1: no 'prompt'"),
        ('{"prompt": 3, "domain": "x"}\n', "line 1: 'prompt' is 3"),
        ('{"prompt": "", "domain": "x"}\n', "line 1: 'prompt' is ''"),
        ('{"prompt": "a", "domain": "x", "seed": 1}\n', "line 1: unknown key 'seed'"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": ' + "1" * 5000 + ', "domain": "x"}\n', "line 1: not JSON"),
        ('{"prompt": "\\ud83d", "domain": "x"}\n', "half of a surrogate pair"),
        ("\n \n", "no prompts"),
        ("", "is empty"),
        ("\ufeff", "is empty"),
    ],
)
def test_bad_prompts_files(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content, encoding="utf-8", newline="")
    with pytest.raises(KairoxError, match=words):
        read_prompts(path)


def test_a_byte_order_mark_is_no_text(tiny_reglu_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_reglu_dir)
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfone two")
    encoded = encode_file(tmp_path / "marked.txt", tokenizer)
    assert encoded.token_ids.tolist() == tokenizer.encode("one two").tolist()
    assert encoded.source.sha256 == hashlib.sha256(b"\xef\xbb\xbfone two").hexdigest()
    (tmp_path / "marked.jsonl").write_text("\ufeff" + GOOD, encoding="utf-8")
    assert [p.text for p in read_prompts(tmp_path / "marked.jsonl")] == ["a"]


def test_text_that_the_tokenizer_cannot_take(tiny_reglu_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(KairoxError, match="cannot encode the text"):
        load_tokenizer(tiny_reglu_dir).encode("a\udcff")  # a byte of a command line, say
    no_unknown = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": no_unknown}))
    with pytest.raises(KairoxError, match="cannot encode the text"):
        load_tokenizer(tmp_path).encode("b")


def test_unreadable_files(tmp_path: Path, tiny_reglu_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_reglu_dir)
    (tmp_path / "latin.txt").write_bytes(b"abc\xe9def")
    with pytest.raises(KairoxError, match="not UTF-8 at byte 3"):
        encode_file(tmp_path / "latin.txt", tokenizer)
    (tmp_path / "wide.txt").write_bytes("ab".encode("utf-16-le"))
    with pytest.raises(KairoxError, match="is not text: it has 2 NUL"):
        encode_file(tmp_path / "wide.txt", tokenizer)
    with pytest.raises(KairoxError, match="cannot read"):
        read_prompts(tmp_path / "absent.txt")
    with pytest.raises(KairoxError, match=r"there is no folder .* nothing is downloaded"):
        load_tokenizer("meta-llama/Llama-2-7b")
    with pytest.raises(KairoxError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(KairoxError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_device_is_no_text() -> None:
    zero = Path("/dev/zero")
    if not zero.is_char_device():
        pytest.skip("no /dev/zero here")
    with pytest.raises(KairoxError, match="is a device, which may never end"):
        read_text(zero)
