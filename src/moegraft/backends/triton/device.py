"""What the kernels' tiles depend on: facts about the GPU, read once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """One GPU.

    Attributes:
        name: as the driver calls it.
        capability: 90 for compute capability 9.0.
        num_sms: streaming multiprocessors.
        shared_memory: bytes that one program may use.
        interpreted: Triton's interpreter runs the kernels on the CPU; nothing overlaps.
    """

    name: str
    capability: int
    num_sms: int
    shared_memory: int
    interpreted: bool = False

    @property
    def has_dependent_launch(self) -> bool:
        """True when launches may overlap on one stream (Hopper and newer)."""
        return self.capability >= 90 and not self.interpreted


#: Stands for the GPU while kernels are interpreted.
INTERPRETER = DeviceFacts("Triton interpreter", 90, 132, 232_448, interpreted=True)


def is_interpreted() -> bool:
    """True when ``TRITON_INTERPRET=1`` was set, so that kernels run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def device_facts() -> DeviceFacts:
    """Return the facts of the current GPU.

    Raises:
        RuntimeError: torch finds no GPU and the interpreter is off.
    """
    if is_interpreted():
        return INTERPRETER
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceFacts(
        name=properties.name,
        capability=properties.major * 10 + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 101_376),
    )
