"""The machine and its state, for the header of a recording: what torch adds to `machine_facts`."""

from __future__ import annotations

from typing import Any

import torch

from kairox_sim.machine_facts import gpu_facts, host_facts, package_versions

PACKAGES = ("kairox", "torch", "transformers", "numba", "numpy")


def machine_facts() -> dict[str, Any]:
    """Plain values for JSON: system, processor, memory, load, packages, and every GPU.

    `gpus` is None where no driver answers, and [] where one does and there is none.
    """
    facts = host_facts()
    cpu = facts["cpu"] | {"torch_threads": torch.get_num_threads()}
    return facts | {"cpu": cpu, "packages": package_versions(PACKAGES), "gpus": gpu_facts()}
