"""Tokens in the order of their slots, in one launch; made once per step, or per piece of a call.

Every program counts the slots of all tokens, which are few bytes, and places a chunk of its own:
nothing has to be handed from one launch to the next.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.sync import launch_next, launch_wait
from moegraft.backends.triton.token_segments import is_capturing
from moegraft.types import TokenSlots

#: Tokens of one program.
CHUNK = 1024


@triton.jit
def _bins(slots_ptr, i, num_tokens, BINS: tl.constexpr):
    """Return 0 for tokens without a slot, else slot + 1; the last one behind the tokens.

    Numbers that are no slots, which an engine's buffer may hold, must not lead out of the bins.
    """
    slot = tl.load(slots_ptr + i, mask=i < num_tokens, other=BINS - 2)
    return tl.minimum(tl.maximum(slot, -1), BINS - 2) + 1


@triton.jit(do_not_specialize=["num_tokens"])
def token_order_kernel(
    slots_ptr,  # [T] int32, -1 = none
    order_ptr,  # [T] int32 out
    num_tokens,
    BINS: tl.constexpr,  # a power of two above the number of slots + 1
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file; stable: tokens of one slot keep their order."""
    launch_next(PDL)
    launch_wait(PDL)
    chunk = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    earlier = tl.zeros([BINS], tl.int32)
    for c in range(0, tl.num_programs(0)):
        i = c * CHUNK + place
        found = tl.histogram(_bins(slots_ptr, i, num_tokens, BINS), BINS)
        counts += found
        earlier += tl.where(c < chunk, found, 0)
    i = chunk * CHUNK + place
    slot = _bins(slots_ptr, i, num_tokens, BINS)
    own = tl.histogram(slot, BINS)
    # Of a token at place p of the sorted chunk: p minus where its slot starts there.
    start = tl.cumsum(counts, 0) - counts + earlier - (tl.cumsum(own, 0) - own)
    keys = tl.sort(slot * CHUNK + place)
    to = tl.gather(start, keys // CHUNK, 0) + place
    token = chunk * CHUNK + keys % CHUNK
    tl.store(order_ptr + to, token, mask=token < num_tokens)


def token_order(
    slots: TokenSlots, num_slots: int, options: dict[str, Any] | None = None
) -> torch.Tensor:
    """Return the tokens sorted by slot, int32 ``[T]``; made once per step.

    Args:
        slots: of the batch; slots of ``num_slots`` and above count as equal.
        num_slots: slots of the table.
        options: of the launch, :meth:`.PrefillConfig.launch_options`.
    """
    key = ("token_order", num_slots, is_capturing(slots))
    found = slots.cache.get(key)
    if found is None:
        tokens = slots.slots.shape[0]
        found = torch.empty(tokens, dtype=torch.int32, device=slots.slots.device)
        listed(token_order_kernel)[(triton.cdiv(tokens, CHUNK),)](
            slots.slots, found, tokens, BINS=max(triton.next_power_of_2(num_slots + 3), 16),
            CHUNK=CHUNK, num_warps=4, **(options or {"PDL": False}),
        )  # fmt: skip
        slots.cache[key] = found
    assert isinstance(found, torch.Tensor)
    return found
