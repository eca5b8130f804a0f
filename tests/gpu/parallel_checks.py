"""A rank's share of a measured layer, and checks of it that are not timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moegraft.bench.cases import DecodeCase
from moegraft.bench.traffic import Traffic, layer_traffic
from moegraft.factor_table import SiteTable, site_table
from moegraft.graphs import GraphRunner, layer_inputs, layer_step
from moegraft.parallel import (
    AllReduceMoe,
    AllToAllMoe,
    ExpertParallel,
    ExpertPlacement,
    MoeGroups,
    shard_experts,
)
from moegraft.parallel.placement import to_local
from moegraft.testing import assert_bit_equal, assert_close, table_on
from moegraft.types import ExpertWeights, TokenSlots


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's share of a layer: how it is spread, its weights and its table."""

    parallel: ExpertParallel
    weights: ExpertWeights
    table: SiteTable

    def layer(self, lora: bool = True, buffer: torch.Tensor | None = None) -> AllReduceMoe:
        """The layer over the ranks; without a table for the base alone."""
        table = self.table if lora else None
        mode = None if lora else "base"
        return AllReduceMoe(self.parallel, self.weights, table, buffer=buffer, mode=mode)


def make_share(case: DecodeCase, groups: MoeGroups, round_robin: bool) -> Share:
    """Slice a whole layer and its adapters for this rank."""
    weights = case.weights
    deal = ExpertPlacement.round_robin if round_robin else ExpertPlacement.contiguous
    placement = deal(weights.num_experts, groups.ep_rank, groups.ep_size)
    parallel = ExpertParallel.of(weights.num_experts, weights.intermediate, groups, placement)
    local = []
    for slot in range(case.table.num_slots):
        factors = case.table.factors(slot)
        assert factors is not None
        local.append(parallel.shard.factors(factors))
    table = site_table(parallel.shard.site(case.table.site), local, weights.dtype)
    table = table_on(table, weights.device)
    return Share(parallel, shard_experts(weights, parallel.shard), table)


def share_traffic(case: DecodeCase, share: Share) -> Traffic:
    """What this rank must move in the mean of the input sets."""
    lookup = share.parallel.shard.placement.lookup(case.slots.device)
    parts = [
        layer_traffic(share.weights, share.table, to_local(s.topk_ids, lookup), case.slots)
        for s in case.sets
    ]
    return Traffic.mean(parts)


def bytes_retention(traffic: Traffic) -> float:
    """The retention of a layer that takes as long as its bytes alone."""
    return traffic.base_bytes / (traffic.base_bytes + traffic.factor_bytes)


def slowest(figure: float) -> float:
    """The largest of all ranks' figures."""
    found: list[float] = [figure] * dist.get_world_size()
    dist.all_gather_object(found, figure)
    return max(found)


def check_equal_inputs(case: DecodeCase) -> None:
    """All ranks drew the same weights, factors and tokens."""
    tensors = (case.weights.down, case.table.arena.data, case.sets[-1].x, case.sets[-1].topk_ids)
    mine = [float(tensor.double().sum()) for tensor in tensors]
    found: list[list[float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    assert all(sums == mine for sums in found), f"the ranks drew different inputs: {found}"


def check_fixed_address(case: DecodeCase, share: Share, one_gpu: torch.Tensor) -> None:
    """Graphs of two buckets write to one buffer, whatever the batch; new batches are right."""
    tokens, hidden = case.sets[0].x.shape
    buffer = torch.full((tokens, hidden), float("nan"), dtype=case.weights.dtype)
    buffer = buffer.to(case.weights.device)
    layer = share.layer(buffer=buffer)
    inner = layer.partial.layer
    spec = layer_inputs(inner, case.sets[0].topk_ids.shape[1], torch.int32)
    runner = GraphRunner(layer_step(layer), spec, (max(1, tokens // 2), tokens))
    first = case.sets[0]
    values = {"x": first.x, "topk_ids": first.topk_ids, "topk_weights": first.topk_weights}
    slots = TokenSlots(case.slots, case.live)
    plain = share.layer()
    for rows in (tokens, max(1, tokens // 3), tokens):
        some = {name: value[:rows] for name, value in values.items()}
        found = runner(some, TokenSlots.of(case.slots[:rows].tolist(), case.slots.device))
        assert found.data_ptr() == buffer.data_ptr(), "the result moved"
        assert_close(found, one_gpu[:rows].float(), found.dtype)
    assert_bit_equal(found, plain(first.x, first.topk_ids, first.topk_weights, slots))


def check_all_to_all(case: DecodeCase, share: Share, one_gpu: torch.Tensor) -> None:
    """Ranks with different tokens, then with none on all but one."""
    layer = AllToAllMoe(share.parallel, share.weights, share.table)
    rank, size = share.parallel.groups.ep_rank, share.parallel.groups.ep_size
    first, tokens = case.sets[0], case.slots.shape[0]
    edges = [tokens * r // size for r in range(size + 1)]
    for bounds in ((edges[rank], edges[rank + 1]), (0, tokens if rank == 0 else 0)):
        rows = slice(*bounds)
        slots = TokenSlots.of(case.slots[rows].tolist(), case.slots.device)
        found = layer(first.x[rows], first.topk_ids[rows], first.topk_weights[rows], slots)
        assert_close(found, one_gpu[rows].float(), found.dtype)
