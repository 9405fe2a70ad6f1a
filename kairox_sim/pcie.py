"""The bus of a graphics card: what sysfs says where NVML does not, and what a link can carry.

The same numbers as `lspci -vv` under LnkSta and LnkCap. A card at rest lets its link fall to the
slowest generation and brings it up under load, so the speed now is a lower bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of VGA and 3D controllers
# GT/s of a lane by generation, and what the line code leaves: 8b/10b to 2, then 128b/130b
# (PCI Express Base Specification 5.0, section 4.2).
GT_PER_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@dataclass(frozen=True, slots=True)
class PcieLink:
    """One link; None is unknown."""

    generation: int | None
    lanes: int | None
    generation_max: int | None
    lanes_max: int | None
    source: str


def link_bytes_per_s(generation: int | None, lanes: int | None) -> float | None:
    """Bytes a second in one direction before protocol overhead; None where either is unknown."""
    if generation not in GT_PER_S or lanes is None:
        return None
    coding = 8 / 10 if generation <= 2 else 128 / 130
    return GT_PER_S[generation] * 1e9 / 8 * coding * lanes


def sysfs_links(root: Path = SYSFS) -> list[PcieLink]:
    """The links of NVIDIA's display controllers, in order of their addresses; [] without sysfs."""
    found = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        if content_of(device / "vendor") != _NVIDIA:
            continue
        if not (content_of(device / "class") or "").startswith(_DISPLAY):
            continue
        found.append(
            PcieLink(
                generation=_generation(content_of(device / "current_link_speed")),
                lanes=_lanes(content_of(device / "current_link_width")),
                generation_max=_generation(content_of(device / "max_link_speed")),
                lanes_max=_lanes(content_of(device / "max_link_width")),
                source="sysfs",
            )
        )
    return found


def content_of(path: Path) -> str | None:
    """What a file of sysfs says; None where it is not there or not for us."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _generation(speed: str | None) -> int | None:
    """ "16.0 GT/s PCIe" -> 4"""
    match = re.match(r"(\d+(?:\.\d+)?) ?GT/s", speed or "")
    if match is None:
        return None
    return next((g for g, rate in GT_PER_S.items() if rate == float(match[1])), None)


def _lanes(width: str | None) -> int | None:
    """The kernel says 0, or 255, where a link is not trained."""
    lanes = int(width) if width is not None and width.isdecimal() else 0
    return lanes if 0 < lanes <= 32 else None
