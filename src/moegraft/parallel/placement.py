"""Which experts of a layer a rank holds: a map from global to local expert numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from moegraft.errors import MoegraftError


@dataclass(frozen=True)
class ExpertPlacement:
    """One rank's experts.

    Two id spaces meet here and nowhere else: the router, files and callers use *global* ids;
    weights, factor tables and kernels use *local* numbers ``0 .. num_local - 1``.

    Attributes:
        global_to_local: per global expert its local number; -1 = another rank's.

    Raises:
        MoegraftError: the local numbers are not 0, 1, .. each once, or the rank has no expert.

    Example: rank 1 of 2 with 4 experts in turn (experts 1 and 3) is
    ``ExpertPlacement((-1, 0, -1, 1))``.
    """

    global_to_local: tuple[int, ...]

    def __post_init__(self) -> None:
        local = sorted(number for number in self.global_to_local if number != -1)
        if not local or local != list(range(len(local))):
            raise MoegraftError(
                f"The local numbers of a rank's experts must be 0, 1, .. each once, -1 for experts "
                f"of other ranks, and one at least; got {local or 'none'} in a map of "
                f"{len(self.global_to_local)} experts."
            )

    @staticmethod
    def of(global_to_local: Sequence[int] | torch.Tensor) -> ExpertPlacement:
        """Make one from an engine's map: one number per global expert, below 0 = not here."""
        numbers = torch.as_tensor(global_to_local).tolist()
        return ExpertPlacement(tuple(max(int(number), -1) for number in numbers))

    @staticmethod
    def contiguous(
        num_experts: int, rank: int, size: int, counts: Sequence[int] | None = None
    ) -> ExpertPlacement:
        """Give each rank a range of experts.

        Args:
            num_experts: experts of the layer.
            rank, size: this rank among those that share the experts.
            counts: experts per rank; None = as even as possible, the first ranks one more.

        Example: 10 experts on 4 ranks are 3, 3, 2 and 2; rank 2 holds experts 6 and 7.
        """
        _check_rank(num_experts, rank, size)
        if counts is None:
            each, more = divmod(num_experts, size)
            counts = [each + (r < more) for r in range(size)]
        if len(counts) != size or sum(counts) != num_experts or min(counts) < 0:
            raise MoegraftError(
                f"counts={list(counts)} do not spread {num_experts} experts over {size} ranks."
            )
        first = sum(counts[:rank])
        inside = range(first, first + counts[rank])
        return ExpertPlacement(tuple(e - first if e in inside else -1 for e in range(num_experts)))

    @staticmethod
    def round_robin(num_experts: int, rank: int, size: int) -> ExpertPlacement:
        """Deal the experts out in turn: rank r holds r, r + size, and so on."""
        _check_rank(num_experts, rank, size)
        return ExpertPlacement(
            tuple(e // size if e % size == rank else -1 for e in range(num_experts))
        )

    @property
    def num_experts(self) -> int:
        """Experts of the layer, on all ranks."""
        return len(self.global_to_local)

    @cached_property
    def local_to_global(self) -> tuple[int, ...]:
        """Global id of each local expert."""
        found = {local: e for e, local in enumerate(self.global_to_local) if local >= 0}
        return tuple(found[local] for local in range(len(found)))

    @property
    def num_local(self) -> int:
        """Experts on this rank."""
        return len(self.local_to_global)

    @cached_property
    def offset(self) -> int | None:
        """Global id of local expert 0 when the experts are a range in order, else None."""
        first = self.local_to_global[0]
        in_order = self.local_to_global == tuple(range(first, first + self.num_local))
        return first if in_order else None

    def lookup(self, device: torch.device) -> torch.Tensor:
        """Return int32 ``[E + 1]`` for :func:`to_local`: the map, and -1 for what is no expert."""
        return torch.tensor([*self.global_to_local, -1], dtype=torch.int32, device=device)


def to_local(topk_ids: torch.Tensor, lookup: torch.Tensor) -> torch.Tensor:
    """Translate global ids, any shape, int32/int64, to int32 local numbers.

    -1, and any id that is no expert of the layer, becomes -1. No host sync; safe in graphs.
    """
    # An index of -1 is the last entry, which is -1 too.
    return lookup[topk_ids.clamp(-1, lookup.shape[0] - 1)]


def _check_rank(num_experts: int, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise MoegraftError(f"rank={rank} is not among size={size} ranks.")
    if num_experts < size:
        raise MoegraftError(
            f"{num_experts} experts on {size} ranks leave ranks without any: use fewer ranks for "
            "experts (a smaller ep_size), and slice each expert over the rest."
        )
