"""The bytes and the arithmetic that a layer call cannot avoid, counted from its real inputs.

*Touched bytes*: the weights of the experts that some pair picks, and the factors of the (adapter,
expert) pairs that some token needs, at their live rank, each once. Activations are counted apart,
and so are the rows of pairs between the layer's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moegraft.factor_table import SiteTable
from moegraft.factors import A_EXPERT_STRIDE, B_EXPERT_STRIDE, RANK_I32, SHARED_A_I32
from moegraft.quant.experts import weight_format_of
from moegraft.types import ExpertWeights


@dataclass(frozen=True)
class Traffic:
    """What one layer call must move and compute.

    Attributes:
        base_bytes: weights and biases of the touched experts.
        factor_bytes: factors of the touched (adapter, expert) pairs.
        activation_bytes: x read once and the output written once.
        row_bytes: h and y of each pair in x's dtype, written once and read once.
        base_flops, lora_flops: multiply-adds, counted as two.
        base_fp8_flops: those of base_flops whose factors are both FP8.

    Example: one token, K=2, H=8, I=6, gated, bf16: 2 experts of 3*8*6*2 = 288 bytes, 576 in all.
    """

    base_bytes: float
    factor_bytes: float
    activation_bytes: float
    row_bytes: float
    base_flops: float
    lora_flops: float
    base_fp8_flops: float = 0.0

    @staticmethod
    def mean(parts: Sequence[Traffic]) -> Traffic:
        """Return the mean over several input sets."""
        names = Traffic.__dataclass_fields__
        return Traffic(*(sum(getattr(p, n) for p in parts) / len(parts) for n in names))

    def record(self) -> dict[str, float]:
        """Return it for a record."""
        return {name: getattr(self, name) for name in Traffic.__dataclass_fields__}


def expert_bytes(weights: ExpertWeights) -> int:
    """Return the bytes of one expert's weights as they are stored, with scales and biases."""
    parts = [weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias]
    if weights.scales is not None:
        s = weights.scales
        parts += [s.gate_up, s.down, s.gate_up_global, s.down_global]
    return sum(p[0].numel() * p.element_size() for p in parts if p is not None)


def layer_traffic(
    weights: ExpertWeights, table: SiteTable | None, topk_ids: torch.Tensor, slots: torch.Tensor
) -> Traffic:
    """Count one call; ``topk_ids [T, K]`` local ids, -1 = none; ``slots [T]``, -1 = base row."""
    ids = topk_ids.long().cpu()
    local = (ids >= 0) & (ids < weights.num_experts)
    num_pairs = int(local.sum())
    item = weights.dtype.itemsize
    macs = weights.hidden * (weights.gate_up_oi.shape[1] + weights.intermediate)
    base_flops = 2.0 * num_pairs * macs
    found = weight_format_of(weights)
    factor_bytes = lora_flops = 0.0
    if table is not None:
        factor_bytes, lora_flops = _factor_traffic(table, ids, local, slots.long().cpu())
    return Traffic(
        base_bytes=ids[local].unique().numel() * expert_bytes(weights),
        factor_bytes=factor_bytes,
        activation_bytes=2 * ids.shape[0] * weights.hidden * item,
        row_bytes=2 * num_pairs * (weights.hidden + weights.intermediate) * item,
        base_flops=base_flops,
        lora_flops=lora_flops,
        base_fp8_flops=0.0 if found is None or found.activation_group is None else base_flops,
    )


def _factor_traffic(
    table: SiteTable, ids: torch.Tensor, local: torch.Tensor, slots: torch.Tensor
) -> tuple[float, float]:
    """Return bytes and flops of the factors that the pairs need."""
    assert table.expert_map is not None, "an experts site"
    item = table.arena.data.element_size()
    records, expert_map = table.records.cpu(), table.expert_map.cpu()
    num_bytes = flops = 0.0
    for slot in slots[slots >= 0].unique().tolist():
        rows = slots == slot
        picked = ids[rows][local[rows]]
        picked = picked[expert_map[slot][picked] >= 0]
        entries, pairs = picked.unique().numel(), picked.numel()
        if not entries:
            continue
        for record, projection in zip(records[slot], table.site.projections, strict=True):
            words = record.view(torch.int32)
            rank, shared_a = int(words[RANK_I32]), bool(words[SHARED_A_I32])
            a_entries = entries if record[A_EXPERT_STRIDE] else 1
            b_entries = entries if record[B_EXPERT_STRIDE] else 1
            a = 0 if shared_a else a_entries * projection.in_features
            num_bytes += rank * item * (a + b_entries * projection.out_features)
            a_macs = 0 if shared_a else projection.in_features
            flops += 2.0 * pairs * rank * (a_macs + projection.out_features)
    return num_bytes, flops


def reuse_bytes(id_sets: Sequence[torch.Tensor], bytes_per_expert: int) -> int:
    """Return the fewest bytes that pass between two uses of an expert's weights.

    The sets ``[T, K]`` run one after the other, over and over. Within a set experts run in the
    order of their ids, so between its uses in sets i and j lie about the bytes of sets i .. j-1.
    """
    experts = [set(ids.reshape(-1).tolist()) - {-1} for ids in id_sets]
    sizes = [len(found) * bytes_per_expert for found in experts]
    fewest = sum(sizes)
    count = len(experts)
    for start in range(count):
        passed = 0
        for step in range(count):
            passed += sizes[(start + step) % count]
            if experts[start] & experts[(start + step + 1) % count]:
                fewest = min(fewest, passed)
                break
    return fewest
