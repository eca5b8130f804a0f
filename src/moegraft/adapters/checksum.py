"""A checksum of large buffers at the speed of memory, the same on every device."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from moegraft.factors import A_OFFSET, B_OFFSET, PackedAdapter, TableLayout
from moegraft.host_copy import in_threads

#: Words of a block, 256 KiB: what is summed up stays in a core's cache.
_BLOCK = 32768
#: Blocks that a device without integer products of matrices sums up at once.
_BLOCKS_AT_ONCE = 256


class Digest:
    """A checksum, or the work that finds it, which is done when it is first asked for.

    Args:
        found: the checksum, or a function that returns it; equal ones compare equal.
    """

    def __init__(self, found: str | Callable[[], str]) -> None:
        self._lock = threading.Lock()
        self._found = found

    @property
    def value(self) -> str:
        """32 hexadecimal digits."""
        with self._lock:
            if not isinstance(self._found, str):
                self._found = self._found()
            return self._found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def checksum_of(
    packed: PackedAdapter, layout: TableLayout, sums: torch.Tensor | None = None
) -> str:
    """Return 32 hexadecimal digits for the factors and scales as served.

    Equal content gives equal digits, whatever layout it came in and wherever its sites lie. Every
    change of one word changes them, and any other change does but for a chance of about 2^-60. It
    tells versions apart; it is no proof against somebody who wants two adapters to have the same.

    BLAKE2b of the table row and of every site: of its bytes, or, where it has 256 KiB or more, of
    one sum per block of 256 KiB, modulo 2^64, of its 64-bit words times fixed odd weights.

    Args:
        packed: the adapter.
        layout: the bank's.
        sums: those sums, site by site, when they are known: :meth:`SiteSums.of`'s. On the host.
    """
    row = packed.row.clone()
    layout.all_records(row)[:, [A_OFFSET, B_OFFSET]] = 0  # where, not what
    digest = hashlib.blake2b(row.numpy().data, digest_size=16)
    sites = [packed.data[begin:end].view(torch.int64) for begin, end in packed.spans.values()]
    if sums is not None:
        split = [len(words) // _BLOCK + 1 for words in sites if len(words) >= _BLOCK]
        known = iter(sums.split(split))
        parts = [next(known) if len(words) >= _BLOCK else words for words in sites]
    else:
        parts = list(sites)

        def sum_up(i: int) -> None:
            if len(sites[i]) >= _BLOCK:
                parts[i] = _block_sums(sites[i])

        in_threads(sum_up, range(len(sites)), packed.num_bytes if packed.data.is_cpu else 0)
    if parts:
        digest.update(torch.cat(parts).cpu().numpy().data)  # from a GPU in one copy
    return digest.hexdigest()


class SiteSums:
    """The sums of a checksum in one launch, for adapters on a GPU whose sites lie alike.

    Args:
        spans: site name -> (begin, end) in elements.
        itemsize: bytes of an element.
    """

    def __init__(self, spans: Mapping[str, tuple[int, int]], itemsize: int) -> None:
        blocks: list[tuple[int, int]] = []
        for begin, end in spans.values():
            first, last = begin * itemsize // 8, end * itemsize // 8
            if last - first >= _BLOCK:
                starts = range(first, last + 1 - (last - first) % _BLOCK, _BLOCK)
                blocks += ((start, min(_BLOCK, last - start)) for start in starts)
        self._blocks = torch.tensor(blocks, dtype=torch.int64).view(-1, 2)
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the sums, int64 on the device of ``data``, by work on the current stream."""
        from moegraft.backends.triton.block_sums import run_block_sums

        blocks = self._on_device.get(data.device)
        if blocks is None:
            blocks = self._on_device[data.device] = self._blocks.to(data.device)
        return run_block_sums(data.view(torch.int64), _weights(data.device), blocks)


def _block_sums(words: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of all blocks, int64; a last block may be shorter."""
    weights = _weights(words.device)
    whole = words.numel() // _BLOCK * _BLOCK
    blocks, rest = words[:whole].view(-1, _BLOCK), words[whole:]
    if words.device.type == "cpu":
        sums = [torch.mv(blocks, weights)]
    else:
        sums = [(some * weights).sum(1) for some in blocks.split(_BLOCKS_AT_ONCE)]
    return torch.cat([*sums, (rest * weights[: rest.numel()]).sum(0, keepdim=True)])


@lru_cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern (SplitMix64), int64 ``[_BLOCK]``."""
    state = torch.arange(1, _BLOCK + 1, dtype=torch.int64) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ (state >> shift)) * factor
    return ((state ^ (state >> 31)) | 1).to(device)
