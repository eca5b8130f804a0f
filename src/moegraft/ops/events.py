"""CUDA events as arguments: a ``torch.cuda.Event``, a raw handle, or 0 for none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from moegraft.errors import MoegraftError

if TYPE_CHECKING:
    #: An event of torch, or the number of a ``cudaEvent_t``; 0 = none.
    EventLike: TypeAlias = torch.cuda.Event | int
else:
    EventLike: TypeAlias = Any


def handle_to_wait_for(event: EventLike, name: str, device: torch.device) -> int:
    """Return the handle of an event to wait for; 0 = none.

    Raises:
        MoegraftError: an event for CPU tensors, or one that was never recorded: nothing could ever
            be waited for, and the delta would be read too early.
    """
    handle = _handle(event, name, device)
    if handle == 0 and not isinstance(event, int):
        raise MoegraftError(
            f"{name} was never recorded, so there is nothing to wait for; record it behind the "
            "launches that compute the delta, or pass 0."
        )
    return handle


def handle_to_record(event: EventLike, name: str, device: torch.device) -> int:
    """Return the handle of an event to record; 0 = none.

    torch makes an event when it is first recorded, so an untouched one is recorded here once.

    Raises:
        MoegraftError: an event for CPU tensors.
    """
    handle = _handle(event, name, device)
    if handle == 0 and not isinstance(event, int):
        event.record(torch.cuda.current_stream(device))
        handle = int(event.cuda_event)
    return handle


def _handle(event: EventLike, name: str, device: torch.device) -> int:
    if isinstance(event, int) and event == 0:
        return 0
    if device.type != "cuda":
        raise MoegraftError(
            f"{name} is given, but the tensors are on {device}, where there are no CUDA events; "
            "pass 0."
        )
    return event if isinstance(event, int) else int(event.cuda_event)
