"""The workspaces that the programs of :mod:`.linear_split` hand partial results over in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from moegraft.backends.triton.token_segments import is_capturing
from moegraft.types import TokenSlots

#: Words of a workspace that nobody has written since it was cleared; a NaN that no result has.
EMPTY = tl.constexpr(-1)


@dataclass
class Partials:
    """Where partial S are left; one per step, stream and size.

    Attributes:
        halves: int32 ``[2, words]``, bits of fp32, or ``EMPTY``.
        turn: which half the next launch writes.
    """

    halves: torch.Tensor
    turn: int = 0


def partials_of(slots: TokenSlots, num_slots: int, words: int) -> Partials:
    """Return the workspace of this step, stream and size; both halves are empty at first.

    Launches over as many slots have the same segments in use, so each clears what another wrote.

    As for the segments, what was made outside of a capture is not used inside, nor the other way
    round, so that a graph clears its own.
    """
    on_gpu = slots.slots.is_cuda
    stream = torch.cuda.current_stream(slots.slots.device).cuda_stream if on_gpu else 0
    key = ("linear_partials", num_slots, words, stream, is_capturing(slots))
    found = slots.cache.get(key)
    if found is None:
        device = slots.slots.device
        halves = torch.full((2, words), EMPTY.value, dtype=torch.int32, device=device)
        found = slots.cache[key] = Partials(halves)
    assert isinstance(found, Partials)
    return found
