"""Ranks of a sharded model run the same batch, or none of them does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from moegraft.errors import AdapterError, MoegraftError


@dataclass(frozen=True)
class HeldRows:
    """A batch whose adapters are in slots.

    Attributes:
        names: adapter per row, None = base.
        slots: name -> slot.

    Example: ``HeldRows(["sql", None], {"sql": 3})``.
    """

    names: Sequence[str | None]
    slots: Mapping[str, int]


@contextmanager
def agreed(hold: AbstractContextManager[HeldRows]) -> Iterator[HeldRows]:
    """Hold a batch's adapters on every rank, or raise on every rank. Collective over all ranks.

    Without it, a rank that was refused leaves the others waiting in the first layer, and ranks
    whose rows have other adapters add up parts of different results. Slots may differ.

    Raises:
        Exception: as ``hold`` does on this rank.
        AdapterError: another rank was refused, or has other rows.
        MoegraftError: another rank failed in any other way, as for want of memory.
    """
    with ExitStack() as stack:
        held: HeldRows | None = None
        failure: Exception | None = None
        try:
            held = stack.enter_context(hold)
        except Exception as error:
            failure = error
        _compare(held, failure)
        assert held is not None
        yield held


def _compare(held: HeldRows | None, failure: Exception | None) -> None:
    refused = isinstance(failure, MoegraftError)
    reason = None
    if failure is not None:
        reason = str(failure) if refused else f"{type(failure).__name__}: {failure}"
    mine = (reason, refused, [] if held is None else list(held.names))
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if failure is not None:
        raise failure
    for rank, (reason, refused, names) in enumerate(everyone):
        if reason is not None:
            kind = AdapterError if refused else MoegraftError
            raise kind(f"Rank {rank} can't run this batch, so no rank does. It says: {reason}")
        if names != mine[2]:
            raise AdapterError(
                f"Rank {dist.get_rank()} was called with adapters={mine[2]}, rank {rank} with "
                f"{names}: all ranks must run the same batch."
            )
