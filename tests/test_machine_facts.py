"""Memory that control groups leave a process: made-up trees of /proc and /sys, sums by hand."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.machine_facts import (
    CGROUP_V1,
    CGROUP_V2,
    MemoryLimit,
    available_bytes,
    host_facts,
    memory_limit,
)

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
NONE_V1 = 9223372036854771712  # what version 1 says where there is no limit


def _own(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    return root


def _group(
    root: Path, at: str, limit: int | str, use: int | None = None, cache: int | None = None
) -> None:
    names = CGROUP_V1 if at.startswith(V1) else CGROUP_V2
    folder = root / at
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    if use is not None:
        (folder / names[1]).write_text(f"{use}\n")
    if cache is not None:
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nactive_file 7\n")


def test_a_container_sees_itself_as_the_root(tmp_path: Path) -> None:
    _group(_own(tmp_path, "0::/"), V2, 4000, use=3000, cache=500)
    assert memory_limit(tmp_path) == MemoryLimit(4000, 1500)


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    """The service may use 4000; its slice 3000, of which another service has most."""
    _own(tmp_path, "0::/a.slice/b.service")
    _group(tmp_path, f"{V2}/a.slice/b.service", 4000, use=1000, cache=0)
    _group(tmp_path, f"{V2}/a.slice", 5000, use=4800, cache=100)
    _group(tmp_path, f"{V2}/c.slice", 10, use=10, cache=0)  # of others
    assert memory_limit(tmp_path) == MemoryLimit(4000, 300)
    _group(tmp_path, f"{V2}/a.slice", "max", use=4800)
    assert memory_limit(tmp_path) == MemoryLimit(4000, 3000)


def test_version_1(tmp_path: Path) -> None:
    """Of a container that is told its path on the machine and sees only its own group."""
    _own(tmp_path, "5:cpu,cpuacct:/docker/1f", "4:hugetlb,memory:/docker/1f", "0::/docker/1f")
    _group(tmp_path, V1, 6000, use=7000, cache=1500)
    assert memory_limit(tmp_path) == MemoryLimit(6000, 500)
    _group(tmp_path, f"{V1}/docker/1f", 5000, use=100, cache=0)  # the whole tree is there
    assert memory_limit(tmp_path) == MemoryLimit(5000, 500)


def test_what_is_not_told_is_none(tmp_path: Path) -> None:
    _group(_own(tmp_path, "0::/"), V2, 4000)
    assert memory_limit(tmp_path) == MemoryLimit(4000, None)
    _group(tmp_path, V2, 4000, use=3000)  # no memory.stat: nothing is promised of the file cache
    assert memory_limit(tmp_path) == MemoryLimit(4000, 1000)
    _group(tmp_path, V2, 4000, use=4100)
    assert memory_limit(tmp_path) == MemoryLimit(4000, 0)


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        (("0::/",), "max"),
        (("4:memory:/",), NONE_V1),
        (("5:cpu:/", "0::/../other"), 4000),  # beside what this namespace shows
        (("1:name=systemd:/",), 4000),
        ((), 4000),
    ],
)
def test_no_limit(lines: tuple[str, ...], limit: int | str, tmp_path: Path) -> None:
    _own(tmp_path, *lines)
    for at in (V2, V1):
        _group(tmp_path, at, limit, use=1000, cache=0)
    assert memory_limit(tmp_path) is None


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    facts = host_facts()
    assert facts["memory_limit_bytes"] != 0


@given(
    st.integers(1, 2**50), st.one_of(st.none(), st.integers(0, 2**50)), st.integers(0, 2**50)
)  # fmt: skip
def test_never_more_than_any_of_them(limit: int, left: int | None, free: int) -> None:
    memory = type("Memory", (), {"available": free})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: memory)
        assert available_bytes(None) == free
        known = [free, limit if left is None else left]
        assert available_bytes(MemoryLimit(limit, left)) == min(known)
