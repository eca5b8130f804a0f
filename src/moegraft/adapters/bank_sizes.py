"""What the sizes of a bank may be."""

from __future__ import annotations

from dataclasses import dataclass

from moegraft.errors import AdapterError, shown

#: Slots and ranks are 32-bit numbers in tables and kernels.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class BankMemory:
    """Bytes: of the arena, of adapters in it, of the table; and the largest free range."""

    arena: int
    used: int
    table: int
    largest_free: int


def check_sizes(num_slots: object, max_rank: object, arena_bytes: object) -> None:
    """Refuse sizes that are no whole numbers, or none that a bank can have.

    Raises:
        AdapterError: names the size.
    """
    if not _is_size(num_slots) or not _is_size(max_rank):
        raise AdapterError(
            "A bank needs at least one slot (max_adapters) and rank 1, in whole numbers below "
            f"2^31; got num_slots={shown(num_slots)}, max_rank={shown(max_rank)}."
        )
    if arena_bytes is not None and not (type(arena_bytes) is int and 0 <= arena_bytes < 1 << 62):
        raise AdapterError(
            f"arena_bytes={shown(arena_bytes)} is no number of bytes; None = grow as needed."
        )


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST
