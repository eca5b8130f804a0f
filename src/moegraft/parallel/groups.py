"""Which ranks share the experts of a layer, and how they agreed on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moegraft.errors import MoegraftError
from moegraft.parallel.expert import ExpertShard
from moegraft.parallel.placement import ExpertPlacement
from moegraft.parallel.tensor import Part


@dataclass(frozen=True, eq=False)
class MoeGroups:
    """The process groups of one set of experts: ``ep_size`` times ``tp_size`` ranks.

    Sizes and ranks are those of the *experts*, taken from the groups: with attention on 4 ranks and
    experts over 2 of them, ``ep_size`` is 2 and each expert is sliced ``tp_size`` = 2 ways.

    Attributes:
        whole: all ranks that hold a piece of the layer; partial sums are added over them.
        expert: the ranks with this rank's slice of I; together they hold every expert.
        tensor: the ranks with this rank's experts, a slice of I each.

    Example: ``MoeGroups.of(ep_size=2)`` on 4 ranks: rank 3 is in ``whole`` 0 to 3, ``expert`` 1, 3
    and ``tensor`` 2, 3.
    """

    whole: dist.ProcessGroup
    expert: dist.ProcessGroup
    tensor: dist.ProcessGroup

    def __post_init__(self) -> None:
        if self.ep_size * self.tp_size != dist.get_world_size(self.whole):
            raise MoegraftError(
                f"Groups of {self.ep_size} (expert) times {self.tp_size} (tensor) ranks are not "
                f"the {dist.get_world_size(self.whole)} ranks of the whole."
            )

    @staticmethod
    def of(ep_size: int | None = None, blocks: Sequence[Sequence[int]] | None = None) -> MoeGroups:
        """Make the groups. Collective: every process calls this with the same arguments.

        Args:
            ep_size: ranks that hold different experts; None = all of a block.
            blocks: the ranks of each copy of the experts, ascending, each rank in one block; inside
                a block the slices of I change fastest. None = one block of all ranks.

        Raises:
            MoegraftError: no process group yet, a block that ep_size does not divide, or blocks
                that do not hold each rank once, ascending.
        """
        if not dist.is_initialized():
            raise MoegraftError(
                "torch.distributed has no process group: call init_process_group first, under "
                "torchrun."
            )
        world = dist.get_world_size()
        blocks = [list(range(world))] if blocks is None else [list(block) for block in blocks]
        if sorted(rank for block in blocks for rank in block) != list(range(world)):
            raise MoegraftError(f"blocks={blocks} must hold each of the {world} ranks once.")
        if any(block != sorted(block) for block in blocks):
            raise MoegraftError(
                f"blocks={blocks}: torch numbers a group's ranks in ascending order."
            )
        ep_sizes = [len(block) if ep_size is None else ep_size for block in blocks]
        for block, ep in zip(blocks, ep_sizes, strict=True):
            if ep < 1 or len(block) % ep:
                raise MoegraftError(
                    f"ep_size={ep} does not divide the {len(block)} ranks {block}; the rest of "
                    "them slice each expert."
                )
        expert, tensor = [], []
        for block, ep in zip(blocks, ep_sizes, strict=True):
            tp = len(block) // ep
            expert += [block[slice_of_i::tp] for slice_of_i in range(tp)]
            tensor += [block[first : first + tp] for first in range(0, len(block), tp)]
        return MoeGroups(*(_own_group(ranks) for ranks in (blocks, expert, tensor)))

    @property
    def ep_rank(self) -> int:
        """Which experts this rank has, 0 to ``ep_size`` - 1."""
        return dist.get_rank(self.expert)

    @property
    def ep_size(self) -> int:
        """Ranks with different experts."""
        return dist.get_world_size(self.expert)

    @property
    def tp_rank(self) -> int:
        """Which slice of I this rank has, 0 to ``tp_size`` - 1."""
        return dist.get_rank(self.tensor)

    @property
    def tp_size(self) -> int:
        """Slices of each expert."""
        return dist.get_world_size(self.tensor)


@dataclass(frozen=True, eq=False)
class ExpertParallel:
    """One layer's experts over ranks, as all ranks agreed on it.

    Attributes:
        groups: the ranks.
        shard: what is on this one.
        rank_of_expert: per global expert its rank in ``groups.expert``.

    Example, on every rank::

        parallel = ExpertParallel.of(128, 768, MoeGroups.of(ep_size=2))
        weights = shard_experts(whole_weights, parallel.shard)
        layer = AllReduceMoe(parallel, weights, bank.site_table(name))
    """

    groups: MoeGroups
    shard: ExpertShard
    rank_of_expert: tuple[int, ...] = field(repr=False)

    @staticmethod
    def of(
        num_experts: int,
        intermediate: int,
        groups: MoeGroups,
        placement: ExpertPlacement | None = None,
    ) -> ExpertParallel:
        """Agree on where the experts are. Collective over ``groups.whole``.

        Args:
            num_experts, intermediate: E and I of the whole layer.
            groups: the ranks.
            placement: this rank's experts; None = contiguous, as even as possible.

        Raises:
            MoegraftError: an expert that no rank holds, or that two hold (it would count twice);
                ranks that slice the same experts but were given different ones. On all ranks.
        """
        if placement is None:
            placement = ExpertPlacement.contiguous(num_experts, groups.ep_rank, groups.ep_size)
        part = Part.of(intermediate, groups.tp_rank, groups.tp_size)
        mine = (num_experts, intermediate, groups.ep_rank, placement.global_to_local)
        all_ranks: list[tuple[int, int, int, tuple[int, ...]]] = [mine] * (
            groups.ep_size * groups.tp_size
        )
        dist.all_gather_object(all_ranks, mine, group=groups.whole)
        return ExpertParallel(groups, ExpertShard(placement, part), _owners(all_ranks))


def _owners(ranks: Sequence[tuple[int, int, int, tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the owner of each expert, or raise the same error on all ranks."""
    sizes = {(num_experts, intermediate) for num_experts, intermediate, _, _ in ranks}
    if len(sizes) > 1:
        raise MoegraftError(f"The ranks were given different sizes (E, I): {sorted(sizes)}.")
    maps: dict[int, tuple[int, ...]] = {}
    for num_experts, _, ep_rank, global_to_local in ranks:
        if len(global_to_local) != num_experts:
            raise MoegraftError(
                f"Expert rank {ep_rank} maps {len(global_to_local)} experts, the layer has "
                f"{num_experts}."
            )
        if maps.setdefault(ep_rank, global_to_local) != global_to_local:
            raise MoegraftError(
                f"The ranks that slice the experts of expert rank {ep_rank} were given different "
                "experts; they must hold the same ones."
            )
    owners: list[int] = []
    for expert in range(ranks[0][0]):
        holders = [ep_rank for ep_rank, numbers in sorted(maps.items()) if numbers[expert] >= 0]
        if len(holders) != 1:
            where = f"by expert ranks {holders}, and would count twice" if holders else "by no rank"
            raise MoegraftError(f"Expert {expert} is held {where}: each must be on one of them.")
        owners.append(holders[0])
    return tuple(owners)


def _own_group(ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group per list of ranks; return the one that this process is in."""
    found, _ = dist.new_subgroups_by_enumeration([list(group) for group in ranks])
    assert isinstance(found, dist.ProcessGroup)
    return found


def owner_table(parallel: ExpertParallel, device: torch.device) -> torch.Tensor:
    """Return int64 ``[E + 1]``: the rank of each expert, and -1 for what is no expert."""
    return torch.tensor([*parallel.rank_of_expert, -1], device=device)
