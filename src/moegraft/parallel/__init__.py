"""Experts and linears over several ranks (torch.distributed): slices, and layers that combine.

placement   which experts a rank holds           tensor      slices of linears
expert      slices of experts and their factors  adapter     slices of whole adapters
groups      ranks, and what they agreed upon     partial     one rank's partial sum
all_reduce  ranks that share a batch             all_to_all  ranks with their own tokens
"""

from moegraft.parallel.adapter import LocalFactors, RankShards, SiteShard
from moegraft.parallel.all_reduce import AllReduceMoe
from moegraft.parallel.all_to_all import AllToAllMoe
from moegraft.parallel.expert import ExpertShard, shard_experts
from moegraft.parallel.groups import ExpertParallel, MoeGroups
from moegraft.parallel.partial import PartialMoe
from moegraft.parallel.placement import ExpertPlacement
from moegraft.parallel.tensor import LinearShard, Part

__all__ = [
    "AllReduceMoe",
    "AllToAllMoe",
    "ExpertParallel",
    "ExpertPlacement",
    "ExpertShard",
    "LinearShard",
    "LocalFactors",
    "MoeGroups",
    "Part",
    "PartialMoe",
    "RankShards",
    "SiteShard",
    "shard_experts",
]
