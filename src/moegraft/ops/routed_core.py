"""What all routed ops share, whatever the weights' format: checks, and the operator's call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch

from moegraft.errors import MoegraftError
from moegraft.ops import arguments
from moegraft.ops.activation_types import ActivationLike, read_activation
from moegraft.ops.events import EventLike, handle_to_record, handle_to_wait_for
from moegraft.ops.operators import routed_moe_lora_op, routed_moe_lora_rows_op
from moegraft.quant.formats import FORMATS, UNQUANTIZED
from moegraft.types import Activation


class UnfinalizedRows(NamedTuple):
    """What ``routed_moe_lora(do_finalize=False)`` returns, for :func:`finalize_moe_lora`.

    Attributes:
        rows: ``[padded, H]`` in the dtype of hidden_states: rows of the down product, without
            routing weight and scaling factor. Rows that no pair points to hold anything.
        topk_weights: bf16 ``[T, K]``.
        expanded_idx_to_permuted_idx: int32 ``[T*K]``: pair ``t*K + k`` -> its row; -1 = not local.
    """

    rows: torch.Tensor
    topk_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor


class RoutedOptions(TypedDict, total=False):
    """The keyword arguments that all routed ops take; see :func:`routed_moe_lora`."""

    topk_weights: torch.Tensor | None
    routing_bias: torch.Tensor | None
    gate_up_lora_delta: torch.Tensor | None
    activation_lora_input: torch.Tensor | None
    num_experts: int | None
    top_k: int | None
    intermediate_size: int | None
    local_expert_offset: int
    local_num_experts: int | None
    routed_scaling_factor: float | None
    routing_method_type: int | None
    do_finalize: bool
    enable_pdl: bool | None
    output: torch.Tensor | None
    activation_type: ActivationLike
    lora_ready_event: EventLike
    gemm2_done_event: EventLike
    up_first: bool
    use_shuffled_weight: bool
    weight_layout: int
    backend: str | None


@dataclass(frozen=True)
class Gemms:
    """The weights of both products.

    Attributes:
        gemm1, gemm2: ``[E, 2I, H]`` and ``[E, H, I]``, or as their format stores them.
        weight_format: ``"unquantized"``, or one of :data:`moegraft.quant.FORMATS`.
        scales: of gemm1 and gemm2, then their global ones if the format has them.

    Example: plain weights are ``Gemms(gemm1, gemm2)``.
    """

    gemm1: torch.Tensor
    gemm2: torch.Tensor
    weight_format: str = UNQUANTIZED
    scales: tuple[torch.Tensor, ...] = ()

    @property
    def storage(self) -> torch.dtype | None:
        """The dtype of quantised values; None for plain ones."""
        found = FORMATS.get(self.weight_format)
        return None if found is None else found.element.storage

    @property
    def per_item(self) -> int:
        """Values in one item of the storage."""
        found = FORMATS.get(self.weight_format)
        return 1 if found is None else found.element.per_item


def run(
    topk_ids: torch.Tensor, hidden_states: torch.Tensor, gemms: Gemms, options: RoutedOptions
) -> torch.Tensor | UnfinalizedRows:
    """Check the arguments of a routed op and run it; see :func:`routed_moe_lora`."""
    arguments.check_shuffle_flags(
        options.get("use_shuffled_weight", False), options.get("weight_layout", 0)
    )
    arguments.check_routing_method(options.get("routing_bias"), options.get("routing_method_type"))
    if gemms.weight_format == UNQUANTIZED:
        arguments.check_plain_weights(gemms.gemm1, gemms.gemm2)
    sizes = _read_sizes(hidden_states, gemms, options)
    local = arguments.local_experts(
        sizes.experts,
        options.get("num_experts"),
        options.get("local_expert_offset", 0),
        options.get("local_num_experts"),
    )
    num_tokens, device, dtype = hidden_states.shape[0], hidden_states.device, hidden_states.dtype
    ids, weights = arguments.read_routing(
        topk_ids, options.get("topk_weights"), num_tokens, options.get("top_k"), device
    )
    pairs = num_tokens * ids.shape[1]
    delta, h = options.get("gate_up_lora_delta"), options.get("activation_lora_input")
    if delta is not None:
        shape = (*ids.shape, sizes.columns)
        arguments.check_tensor(delta, "gate_up_lora_delta", shape, device, contiguous=True)
        delta = delta.view(pairs, sizes.columns)
    output = options.get("output")
    if h is not None:
        shape = (*ids.shape, sizes.intermediate)
        arguments.check_tensor(h, "activation_lora_input", shape, device, dtype, contiguous=True)
        read = {"gate_up_lora_delta": delta, "hidden_states": hidden_states}
        arguments.check_written(h, "activation_lora_input", {**read, "output": output})
        h = h.view(pairs, sizes.intermediate)
    act = sizes.activation
    common = (
        hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous(),
        ids, weights, gemms.gemm1, gemms.gemm2, gemms.weight_format, list(gemms.scales),
        dtype if gemms.scales else None, delta, sizes.order, act.kind, act.limit, act.alpha,
        act.up_shift, local.first,
    )  # fmt: skip
    ends = (
        handle_to_wait_for(options.get("lora_ready_event", 0), "lora_ready_event", device),
        handle_to_record(options.get("gemm2_done_event", 0), "gemm2_done_event", device),
        options.get("enable_pdl") is not False,
        options.get("backend") or "",
    )
    factor = options.get("routed_scaling_factor")
    scale = 1.0 if factor is None else float(factor)
    if options.get("do_finalize", True):
        out = _output(output, hidden_states, delta)
        routed_moe_lora_op(*common, scale, *ends, out, h)
        return out
    if output is not None or scale != 1.0:
        raise MoegraftError(
            f"With do_finalize=False there is nothing to sum: give output and "
            f"routed_scaling_factor={scale} to finalize_moe_lora."
        )
    rows = hidden_states.new_empty(pairs, hidden_states.shape[1])
    pair_to_row = torch.empty(pairs, dtype=torch.int32, device=device)
    routed_moe_lora_rows_op(*common, *ends, rows, pair_to_row, h)
    return UnfinalizedRows(rows, weights.to(torch.bfloat16), pair_to_row)


@dataclass(frozen=True)
class _Sizes:
    """What the weights' shapes say: E, I, gate_up's columns and how they are ordered."""

    experts: int
    intermediate: int
    columns: int
    order: str
    activation: Activation


def _read_sizes(hidden_states: torch.Tensor, gemms: Gemms, options: RoutedOptions) -> _Sizes:
    activation, gated = read_activation(options.get("activation_type"))
    intermediate_size, gemm1, gemm2 = options.get("intermediate_size"), gemms.gemm1, gemms.gemm2
    if hidden_states.dim() != 2 or gemm1.dim() != 3 or gemm2.dim() != 3:
        raise MoegraftError(
            f"hidden_states {tuple(hidden_states.shape)} must be [T, H], gemm1_weights "
            f"{tuple(gemm1.shape)} [E, 2I, H] and gemm2_weights {tuple(gemm2.shape)} [E, H, I]."
        )
    for name, tensor in (("gemm1_weights", gemm1), ("gemm2_weights", gemm2)):
        if gemms.storage not in (None, tensor.dtype):
            raise MoegraftError(
                f"{name} is {tensor.dtype}; {gemms.weight_format} is stored as {gemms.storage}."
            )
    hidden, device = hidden_states.shape[1], hidden_states.device
    experts, per_item = gemm2.shape[0], gemms.per_item
    intermediate = gemm2.shape[2] * per_item
    if intermediate_size is not None and intermediate_size != intermediate:
        raise MoegraftError(
            f"intermediate_size is {intermediate_size}, but gemm2_weights {tuple(gemm2.shape)} "
            f"have I = {intermediate}."
        )
    if gated is None:
        gated = gemm1.shape[1] != intermediate
    columns = intermediate * (2 if gated else 1)
    for name, tensor, shape in (
        ("gemm1_weights", gemm1, (experts, columns, hidden // per_item)),
        ("gemm2_weights", gemm2, (experts, hidden, gemm2.shape[2])),
    ):
        if tuple(tensor.shape) != shape:
            raise MoegraftError(
                f"{name} has shape {tuple(tensor.shape)}; expected {shape}: E = {experts}, "
                f"I = {intermediate} and H = {hidden}, {'with' if gated else 'without'} a gate."
            )
        if (tensor.dtype, tensor.device) != (gemms.storage or hidden_states.dtype, device):
            raise MoegraftError(
                f"{name} is {tensor.dtype} on {tensor.device}, hidden_states "
                f"{hidden_states.dtype} on {device}; they must agree."
            )
    order = "no_gate" if not gated else "up_first" if options.get("up_first") else "gate_first"
    return _Sizes(experts, intermediate, columns, order, activation)


def _output(
    output: torch.Tensor | None, hidden_states: torch.Tensor, delta: torch.Tensor | None
) -> torch.Tensor:
    if output is None:
        return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    if output is hidden_states:
        raise MoegraftError("output is hidden_states; the op reads them while it writes.")
    shape = tuple(hidden_states.shape)
    arguments.check_tensor(output, "output", shape, hidden_states.device, hidden_states.dtype)
    read = {"hidden_states": hidden_states, "gate_up_lora_delta": delta}
    arguments.check_written(output, "output", read)
    return output
