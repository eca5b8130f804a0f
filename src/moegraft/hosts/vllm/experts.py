"""The experts of one layer: vLLM's call on moegraft's op, adapters read from vLLM's own slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize import (
    MoEPrepareAndFinalizeNoDPEPModular,
)

from moegraft.factor_table import SiteTable
from moegraft.hosts.formula import Formula, WeightsInPlace
from moegraft.hosts.vllm.counters import count
from moegraft.hosts.vllm.steps import expert_slots
from moegraft.ops import moe_lora
from moegraft.types import TokenSlots


class MoegraftExperts(TritonExperts):
    """vLLM's Triton experts with another ``apply``.

    A subclass, since everything but the arithmetic is theirs: which devices, activations and
    parallel settings go, the format of the activations, and that the result is weighted and summed.
    vLLM wraps the call in an operator of its own, so nothing here is traced or compiled.

    Args:
        stock: the object that vLLM made, which this one replaces.
        formula: activation and layout of the weights.
        table: the adapters' factors.
        expert_map: vLLM's map of global to local expert ids when it never changes; None = no map,
            or one that is rewritten while serving.
        into_result: :meth:`apply` leaves the work to vLLM's last step, which knows the layer's
            result and would else copy to it; see :func:`copies_result`.
    """

    def __init__(
        self,
        stock: TritonExperts,
        formula: Formula,
        table: SiteTable,
        expert_map: torch.Tensor | None,
        into_result: bool = False,
    ) -> None:
        super().__init__(stock.moe_config, stock.quant_config)
        self.stock = stock
        self.formula = formula
        self.table = table
        self._fixed_map = expert_map
        self._offset = None if expert_map is None else contiguous_offset(expert_map)
        self._weights = WeightsInPlace(formula)
        self._last_step = _IntoResult() if into_result else None
        if stock._lora_context is not None:
            self.set_lora_context(stock._lora_context)

    def renewed(self, stock: TritonExperts) -> MoegraftExperts:
        """Return the same for the object that vLLM made in place of :attr:`stock`."""
        into_result = self._last_step is not None
        return MoegraftExperts(stock, self.formula, self.table, self._fixed_map, into_result)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Return what vLLM's last step calls: nothing is left to do, or all of the work is."""
        return self._last_step or super().finalize_weight_and_reduce_impl()

    def workspace_shapes(
        self, M: int, N: int, K: int, *_: Any, **__: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of vLLM's two scratch buffers (none is used) and of the output."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sum over each token's experts to ``output`` ``[T, H]``.

        With ``into_result`` that is done later, and to the layer's result.

        With ``apply_router_weight_on_input`` the rows are weighted already: all weights are 1 then.
        ``topk_ids`` are global, -1 = no expert, and so is what ``expert_map`` says for the experts
        of other ranks.
        """
        run = partial(
            self._run,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            expert_map,
            apply_router_weight_on_input,
        )
        if self._last_step is None:
            run(output)
        else:
            self._last_step.run = run

    def _run(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        output: torch.Tensor,
    ) -> None:
        slots = self._live_slots(hidden_states.shape[0])
        offset = 0
        if expert_map is not None:
            fixed = self._fixed_map
            if self._offset is not None and fixed is not None and _same(expert_map, fixed):
                offset = self._offset
            else:
                topk_ids = local_ids(topk_ids, expert_map)
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        moe_lora(
            hidden_states,
            topk_ids,
            topk_weights,
            self._weights.of(w1, w2, self.w1_bias, self.w2_bias),
            self.table,
            slots,
            expert_offset=offset,
            out=output,
        )
        count("expert_calls")
        if slots is not None:
            count("expert_calls_with_adapters")

    def _live_slots(self, num_tokens: int) -> TokenSlots | None:
        """Return the step's slots; None when no row has an adapter with factors here."""
        if self._lora_context is None:
            return None
        slots = expert_slots(self._lora_context, num_tokens)
        return slots if slots is not None and self.table.has_delta(slots) else None


class _IntoResult(mk.TopKWeightAndReduce):
    """vLLM's last step, with the whole layer in it: it is told the result's memory."""

    run: Callable[[torch.Tensor], None] | None = None

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """Do what the experts' call left; vLLM makes none for no tokens."""
        result = fused_expert_output if output is None else output
        run, self.run = self.run, None
        if topk_ids.shape[0]:
            assert run is not None, "vLLM's last step came without a call of the experts"
            run(result)
        return result


def copies_result(prepare_finalize: Any) -> bool:
    """Return True where vLLM gives experts scratch memory and then copies from it to the result.

    Later versions, which may ask ``prepare_finalize`` for the memory, let experts write to the
    result; and where rows are sent between ranks they have to come back first.
    """
    return type(prepare_finalize) is MoEPrepareAndFinalizeNoDPEPModular and not hasattr(
        prepare_finalize, "allocate_fused_expert_output"
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or a.data_ptr() == b.data_ptr()


def contiguous_offset(expert_map: torch.Tensor) -> int | None:
    """Return the global id of local expert 0 when the local experts are one range, in order.

    Args:
        expert_map: int ``[global experts]``, global -> local id, -1 = elsewhere.
    """
    local = (expert_map >= 0).nonzero().flatten().cpu()
    if not local.numel():
        return None
    first = int(local[0])
    there = expert_map.cpu()[first : first + local.numel()]
    return first if torch.equal(there.long(), torch.arange(local.numel())) else None


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Return local ids, -1 for what is not here; ``topk_ids`` may hold -1 themselves."""
    mapped = expert_map[topk_ids.clamp(min=0).long()]
    return torch.where(topk_ids < 0, -1, mapped)
