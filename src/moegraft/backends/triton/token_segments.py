"""The tokens of a step sorted by adapter slot and cut into segments: once per step, not per layer.

Dense linears need no experts: which rows share an adapter is the same in every layer. One launch
counts, by comparison, how many tokens each slot has and how many of its own slot come before each
token; that is a stable sort. No atomics, no program waits for another, nothing comes back to the
host.

The number of segments is bounded on the host: a slot with ``n > 0`` tokens has ``ceil(n / rows) <=
(n + rows - 1) / rows`` segments. Summed over the slots that have tokens, at most ``min(S, T)``,
that is at most ``(T + (rows - 1) * min(S, T)) / rows``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.sync import launch_next, launch_wait
from moegraft.types import TokenSlots

#: Above this many tokens torch sorts on the device: counting is quadratic.
MAX_COUNTED_TOKENS = 8192
#: Words of a segment: first and last + 1 place in ``order``, slot, unused.
SEGMENT_WORDS = 4


@dataclass(frozen=True)
class TokenSegments:
    """Runs of at most ``rows`` tokens of one slot.

    Attributes:
        order: int32 ``[max_segments * rows]``, tokens sorted by slot, stable: those of segment g
            from place ``g * rows`` on, -1 behind its last. Tokens without an adapter are left out,
            and the places of unused segments are undefined.
        segments: int32 ``[max_segments, 4]``: start, end, slot, unused. Segment g is the tokens
            ``order[start:end]``, with ``start = g * rows``. Those that are used come first; the
            others are (0, 0, -1).
        rows: the most tokens of one segment.

    Example: slots [2, -1, 0, 2] with rows=4: order [2, -1, -1, -1, 0, 3, -1, -1, undefined],
    segments (0, 1, 0), (4, 6, 2) and then (0, 0, -1).
    """

    order: torch.Tensor
    segments: torch.Tensor
    rows: int


def max_segments(num_tokens: int, num_slots: int, rows: int) -> int:
    """Return how many segments T tokens on S slots can need; the proof is at the top."""
    return (num_tokens + (rows - 1) * min(num_slots, num_tokens)) // rows


def is_capturing(slots: TokenSlots) -> bool:
    """True while the current stream's launches become part of a CUDA graph."""
    return slots.slots.is_cuda and torch.cuda.is_current_stream_capturing()


def _key(slots: TokenSlots, num_slots: int, rows: int) -> tuple[object, ...]:
    return ("token_segments", num_slots, rows, is_capturing(slots))


def has_segments(slots: TokenSlots, num_slots: int, rows: int) -> bool:
    """True when :func:`token_segments` would launch nothing."""
    return _key(slots, num_slots, rows) in slots.cache


def token_segments(
    slots: TokenSlots, num_slots: int, rows: int, pdl: bool = False
) -> TokenSegments:
    """Return a step's segments, made at the first use and kept in ``slots.cache``.

    A token's slot outside ``[0, num_slots)`` counts as none. The entry depends on the slots alone,
    so no change of the bank makes it stale.

    In a CUDA graph the launch must be part of the graph, since replays change the slots in place:
    what was made outside of a capture is not used inside, nor the other way round. A second graph
    needs a TokenSlots of its own, or it would rely on the first one's launch.
    """
    key = _key(slots, num_slots, rows)
    found = slots.cache.get(key)
    if found is None:
        many = slots.num_tokens > MAX_COUNTED_TOKENS
        make = segments_by_sorting if many else segments_by_counting
        found = slots.cache[key] = make(slots.slots, num_slots, rows, pdl)
    assert isinstance(found, TokenSegments)
    return found


def segments_by_counting(
    slots: torch.Tensor, num_slots: int, rows: int, pdl: bool = False
) -> TokenSegments:
    """Make the segments of ``slots`` int32 ``[T]`` in one launch; T**2 comparisons."""
    num_tokens = slots.shape[0]
    number = max_segments(num_tokens, num_slots, rows)
    order = torch.empty(number * rows, dtype=torch.int32, device=slots.device)
    segments = torch.empty(number, SEGMENT_WORDS, dtype=torch.int32, device=slots.device)
    block_i = 16 if num_tokens <= 1024 else 64
    # Interpreters and older cards know no such option, so it is only passed when it is on.
    options = {"launch_pdl": True} if pdl else {}
    if num_tokens:
        listed(token_segments_kernel)[(triton.cdiv(num_tokens, block_i),)](
            slots, order, segments, num_tokens, num_slots, number, ROWS=rows, BLOCK_I=block_i,
            BLOCK_J=64, BLOCK_S=32, BLOCK_G=128, PDL=pdl, num_warps=4, **options,
        )  # fmt: skip
    return TokenSegments(order, segments, rows)


def segments_by_sorting(
    slots: torch.Tensor, num_slots: int, rows: int, pdl: bool = False
) -> TokenSegments:
    """Make the same segments with torch's sort, for any T; ``pdl`` changes nothing."""
    device = slots.device
    has_slot = (slots >= 0) & (slots < num_slots)
    keys, order = torch.where(has_slot, slots, num_slots).sort(stable=True)
    bounds = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
    starts = torch.searchsorted(keys, bounds)
    counts = starts[1:] - starts[:-1]
    ends = ((counts + rows - 1) // rows).cumsum(0)
    number = max_segments(slots.shape[0], num_slots, rows)
    g = torch.arange(number, device=device)
    slot = torch.searchsorted(ends, g, right=True)
    used = slot < num_slots
    slot = slot.clamp(max=num_slots - 1)
    count = counts[slot]
    part = g - (ends[slot] - (count + rows - 1) // rows)
    start = g * rows
    size = torch.minimum(count - part * rows, torch.full_like(count, rows))
    zero = torch.zeros_like(g)
    words = (
        torch.where(used, start, 0),
        torch.where(used, start + size, 0),
        torch.where(used, slot, -1),
    )
    segments = torch.stack((*words, zero), 1).to(torch.int32)
    place = torch.arange(rows, device=device)
    source = (starts[slot] + part * rows)[:, None] + place
    tokens = order[source.clamp(max=max(order.shape[0] - 1, 0))]
    padded = torch.where(place < size[:, None], tokens, -1)
    return TokenSegments(padded.flatten().to(torch.int32), segments, rows)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_segments"])
def token_segments_kernel(
    slots_ptr,  # [T] int32
    order_ptr,  # [num_segments, ROWS] int32 out
    segments_ptr,  # [num_segments, 4] int32 out
    num_tokens,
    num_slots,
    num_segments,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program places BLOCK_I tokens; see the top of the file."""
    launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    i = pid * BLOCK_I + tl.arange(0, BLOCK_I)
    slot = tl.load(slots_ptr + i, mask=i < num_tokens, other=-1)
    has_slot = (slot >= 0) & (slot < num_slots)
    group_size = tl.zeros([BLOCK_I], tl.int32)  # tokens of this slot
    first_segment = tl.zeros([BLOCK_I], tl.int32)  # segments of earlier slots
    num_used = 0
    for s0 in range(0, num_slots, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        same = tl.zeros([BLOCK_S, BLOCK_J], tl.int32)
        for j0 in range(0, num_tokens, BLOCK_J):
            j = j0 + tl.arange(0, BLOCK_J)
            j_slot = tl.load(slots_ptr + j, mask=j < num_tokens, other=-1)
            same += (j_slot[None, :] == s[:, None]).to(tl.int32)
        count = tl.where(s < num_slots, tl.sum(same, 1), 0)
        parts = (count + ROWS - 1) // ROWS
        earlier = s[None, :] < slot[:, None]
        first_segment += tl.sum(tl.where(earlier, parts[None, :], 0), 1)
        group_size += tl.sum(tl.where(s[None, :] == slot[:, None], count[None, :], 0), 1)
        num_used += tl.sum(parts, 0)
    same_before = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for j0 in range(0, (pid + 1) * BLOCK_I, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        j_slot = tl.load(slots_ptr + j, mask=j < num_tokens, other=-1)
        is_before = (j_slot[None, :] == slot[:, None]) & (j[None, :] < i[:, None])
        same_before += is_before.to(tl.int32)
    before = tl.sum(same_before, 1)
    segment = first_segment + before // ROWS
    place = before % ROWS
    tl.store(order_ptr + segment * ROWS + place, i, mask=has_slot)
    # The last token of a slot fills what is left of its segment.
    places = tl.arange(0, ROWS)[None, :]
    is_last = has_slot & (before == group_size - 1)
    rest = is_last[:, None] & (places > place[:, None])
    tl.store(order_ptr + segment[:, None] * ROWS + places, -1, mask=rest)
    is_head = has_slot & (place == 0)
    words = segments_ptr + segment * 4
    start = segment * ROWS
    tl.store(words, start, mask=is_head)
    tl.store(words + 1, start + tl.minimum(group_size - before, ROWS), mask=is_head)
    tl.store(words + 2, slot, mask=is_head)
    tl.store(words + 3, 0, mask=is_head)
    if pid == 0:
        for g0 in range(0, num_segments, BLOCK_G):
            g = g0 + tl.arange(0, BLOCK_G)
            unused = (g >= num_used) & (g < num_segments)
            for word in tl.static_range(4):
                tl.store(segments_ptr + g * 4 + word, -1 if word == 2 else 0, mask=unused)
