"""Slices of linears over ranks, base and factors alike (tensor parallelism).

The delta of a rank is always in the state of the rank's base output:

- ``column``: the rank computes some of the outputs. B is sliced, A whole; the delta is final.
- ``row``: the rank reads some of the inputs. A is sliced, B whole; base and delta are *partial
  sums*. Add the delta before the ranks' outputs are summed, so that it counts once.
- ``whole``: every rank computes everything, and adds the whole delta.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from moegraft.errors import MoegraftError
from moegraft.sites import LINEAR_PROJECTION, Projection, Site
from moegraft.type_checks import check_choice
from moegraft.types import LoraFactor, SiteFactors

LinearState = Literal["column", "row", "whole"]


@dataclass(frozen=True)
class Part:
    """A range of a dimension that is spread over ranks.

    Attributes:
        start, end: the range, half open.
        size: of the whole dimension.

    Example: I=20 on three ranks is 7, 7 and 6; ``Part.of(20, rank=2, ranks=3)`` is
    ``Part(14, 20, 20)``.
    """

    start: int
    end: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= self.size:
            raise MoegraftError(
                f"Columns {self.start} to {self.end} of {self.size} are no part of them: a rank "
                "needs at least one. Slice over fewer ranks."
            )

    @staticmethod
    def of(size: int, rank: int, ranks: int) -> Part:
        """Return a rank's part, cut as ``torch.chunk`` and DTensor do: the last may be shorter.

        ``rank`` and ``ranks`` count those that slice *this* module: experts on ep of tp ranks are
        sliced tp/ep ways, a module that is replicated one way.

        Raises:
            MoegraftError: the rank is not among the ranks, or nothing is left for it.
        """
        if not 0 <= rank < ranks:
            raise MoegraftError(f"rank={rank} is not among {ranks} ranks.")
        each = -(-size // ranks)
        return Part(min(rank * each, size), min((rank + 1) * each, size), size)

    @property
    def width(self) -> int:
        """How much of the dimension this is."""
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """True when nothing is sliced off."""
        return self.width == self.size


@dataclass(frozen=True)
class LinearShard:
    """What of a dense linear is on this rank.

    Attributes:
        state: which dimension is sliced; see :mod:`moegraft.parallel.tensor`.
        part: the range of outputs (``column``) or inputs (``row``); None for ``whole``.

    Example: rank 0 of 2 of an ``o_proj`` with 64 inputs is ``LinearShard("row", Part(0, 32, 64))``.
    """

    state: LinearState = "whole"
    part: Part | None = None

    def __post_init__(self) -> None:
        check_choice("state of a linear", self.state, get_args(LinearState))
        if (self.state == "whole") != (self.part is None):
            raise MoegraftError(f"State {self.state!r} and part {self.part} contradict each other.")

    def site(self, site: Site) -> Site:
        """Return the local site of a linear whose whole site is given."""
        if self.part is None:
            return site
        whole = site.projections[0]
        sizes = (whole.in_features, whole.out_features)
        check_size(site.name, self.part, sizes[0 if self.state == "row" else 1])
        sizes = (self.part.width, sizes[1]) if self.state == "row" else (sizes[0], self.part.width)
        return replace(site, projections=(Projection(LINEAR_PROJECTION, *sizes),))

    def factors(self, factors: SiteFactors) -> SiteFactors:
        """Return the local views of one adapter's factors ``lora_A [1, R, in]``, ``lora_B
        [1, out, R]`` of the whole linear."""
        if self.part is None:
            return factors
        slice_one = slice_in if self.state == "row" else slice_out
        sliced = {n: slice_one(f, self.part) for n, f in factors.projections.items()}
        return replace(factors, projections=sliced)


def slice_out(factor: LoraFactor, part: Part) -> LoraFactor:
    """Return the factor for some of the outputs: rows of B; A is the very same tensor."""
    return replace(factor, lora_B=factor.lora_B[:, part.start : part.end])


def slice_in(factor: LoraFactor, part: Part) -> LoraFactor:
    """Return the factor for some of the inputs: columns of A; its delta is a partial sum."""
    return replace(factor, lora_A=factor.lora_A[:, :, part.start : part.end])


def check_size(where: str, part: Part, size: int) -> None:
    """Raise unless a part was made for a dimension of this size."""
    if part.size != size:
        raise MoegraftError(
            f"{where}: the part is of {part.size} columns, the weights have {size}."
        )
