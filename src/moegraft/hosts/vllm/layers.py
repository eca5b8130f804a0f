"""vLLM's LoRA wrappers of experts layers, with moegraft behind them.

vLLM finds the class of a wrapper in a tuple, and asks some objects for the *name* of their class:
the classes here bear the names of those they replace. A wrapper owns the slot tensors
``[slots, E or 1, rank, in]`` and ``[slots, E or 1, out, rank]``; ``set_lora`` overwrites a slot
with one adapter, scaled already, ``reset_lora`` with zeros. Both happen between steps.

Factors B are kept rank-major here, ``[slots, E or 1, rank, out]``, behind views of vLLM's shape:
the kernels read whole rank rows, and in place.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from vllm.lora.layers import fused_moe as stock

from moegraft.adapters.foreign import ForeignPool, stacked_pool
from moegraft.hosts.formula import Formula
from moegraft.hosts.slot_tensors import rank_major
from moegraft.hosts.vllm.counters import count
from moegraft.hosts.vllm.eligible import experts_formula, say_why_not
from moegraft.hosts.vllm.experts import MoegraftExperts, copies_result
from moegraft.sites import expert_site


class _ExpertsOnMoegraft:
    """What both wrappers do beyond vLLM's."""

    _moegraft_formula: Formula | None = None
    _moegraft_pool: ForeignPool | None = None

    def create_lora_weights(
        self: Any, max_loras: int, lora_config: Any, model_config: Any = None
    ) -> None:
        """Make the slot tensors, and put moegraft's experts in place of vLLM's."""
        found = experts_formula(self, lora_config)
        if isinstance(found, str):
            say_why_not(self.base_layer.layer_name, found)
            count("expert_layers_left")
        else:
            self._moegraft_formula = found
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        if self._moegraft_formula is not None:
            self._moegraft_pool = _pool(self, self._moegraft_formula)
            kernel, moves = self._moe_kernel.impl, self.moe_config.moe_parallel_config.enable_eplb
            kernel.fused_experts = MoegraftExperts(
                kernel.fused_experts,
                self._moegraft_formula,
                self._moegraft_pool.table,
                None if moves else self.base_layer.expert_map,
                copies_result(kernel.prepare_finalize),
            )
            count("expert_layers")

    def _create_lora_b_weights(self: Any, max_loras: int, lora_config: Any) -> None:
        super()._create_lora_b_weights(max_loras, lora_config)  # type: ignore[misc]
        if self._moegraft_formula is not None:
            self.w13_lora_b_stacked = tuple(map(rank_major, self.w13_lora_b_stacked))
            self.w2_lora_b_stacked = tuple(map(rank_major, self.w2_lora_b_stacked))

    def reset_lora(self, index: int) -> None:
        """Empty a slot."""
        super().reset_lora(index)  # type: ignore[misc]
        if self._moegraft_pool is not None:
            self._moegraft_pool.clear(index)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Fill a slot with one adapter; A is ``[E or 1, rank, in]`` for each of vLLM's slices."""
        super().set_lora(index, lora_a, lora_b)  # type: ignore[misc]
        if self._moegraft_pool is not None:
            _load(self._moegraft_pool, index, lora_a, lora_b)

    def _match_expert_dim(self, src: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Let one factor for all experts be copied to each, where the slots have room for each."""
        if self._moegraft_pool is not None and src.shape[0] == 1:
            return src
        return super()._match_expert_dim(src, buffer)  # type: ignore[misc]


class FusedMoEWithLoRA(_ExpertsOnMoegraft, stock.FusedMoEWithLoRA):
    """Gate and up in slices of their own."""


class FusedMoE3DWithLoRA(_ExpertsOnMoegraft, stock.FusedMoE3DWithLoRA):
    """Gate and up in one slice, with one A."""


def _pool(wrapper: Any, found: Formula) -> ForeignPool:
    site = expert_site(
        wrapper.base_layer.layer_name,
        wrapper.local_num_experts,
        wrapper.hidden_size,
        wrapper.intermediate_size_per_partition,
        found.layout,
    )
    pool = stacked_pool(
        site,
        wrapper.w13_lora_a_stacked,
        wrapper.w13_lora_b_stacked,
        wrapper.w2_lora_a_stacked,
        wrapper.w2_lora_b_stacked,
    )
    if pool.device.type != "cpu":
        pool.expect_adapters()  # vLLM captures its graphs before adapters come
    return pool


def _load(pool: ForeignPool, slot: int, lora_a: list[Any], lora_b: list[Any]) -> None:
    """Tell the pool what a slot holds now.

    vLLM's order is gate, down, up; or gate and up in one, down. Experts without a gate have their
    up first, and once more in the third place. One entry in place of E is shared by all experts.
    """
    if pool.site.gated:
        of = {"gate": 0, "up": 2 if len(lora_a) == 3 else 0, "down": 1}
    else:
        of = {"up": 0, "down": 1}
    tensors: dict[tuple[str, Literal["A", "B"]], torch.Tensor] = {
        **{(name, "A"): lora_a[i] for name, i in of.items()},
        **{(name, "B"): lora_b[i] for name, i in of.items()},
    }
    pool.load(
        slot,
        {name: int(lora_a[i].shape[1]) for name, i in of.items()},
        shared=[factor for factor, tensor in tensors.items() if tensor.shape[0] == 1],
        one_a=pool.site.gated and lora_a[of["gate"]] is lora_a[of["up"]],
    )
