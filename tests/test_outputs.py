"""Where results may go: an ordinary file, of their own."""

import os
import sys
from pathlib import Path

import pytest

from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_apart, require_place


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs")
def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(KairoxError, match="is a device or a pipe"):
        require_place(pipe, "table")
    with pytest.raises(KairoxError, match="is a device or a pipe"):
        require_place(os.devnull, "table")


def test_every_output_has_a_file_of_its_own(tmp_path: Path) -> None:
    text, link = tmp_path / "text.txt", tmp_path / "link"
    text.write_text("read")
    link.symlink_to(text)
    require_apart({"trace": tmp_path / "a", "log": tmp_path / "b", "states": None}, [text])
    with pytest.raises(KairoxError, match=r"log: .* is the file of the trace too"):
        require_apart({"trace": tmp_path / "a", "log": tmp_path / "." / "a"}, [])
    for output in (text, link, tmp_path / "absent" / ".." / "text.txt"):
        with pytest.raises(KairoxError, match=r"trace: .* is read in this run"):
            require_apart({"trace": output}, [text])
