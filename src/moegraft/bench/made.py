"""The weights and adapters of a measurement, kept while the next request can share them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from moegraft.bench.cases import draw_layer, random_layer, random_table, style_of
from moegraft.bench.options import DecodeRequest
from moegraft.bench.shapes import ModelShape
from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.plan.select import make_plan
from moegraft.problem import Problem
from moegraft.quant.experts import quantise_experts
from moegraft.types import ExpertWeights

#: Share of the free memory that weights and adapters may take; the rest is for work buffers.
_MEMORY_SHARE = 0.8


class Made:
    """The last weights and table, which the next request may share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plain: tuple[str, ExpertWeights] | None = None
        self._quantised: tuple[tuple[str, str], ExpertWeights] | None = None
        self._table: tuple[tuple[Any, ...], SiteTable] | None = None

    def get(self, request: DecodeRequest) -> tuple[ExpertWeights, SiteTable]:
        """Return a request's weights and table, freeing those of another request first."""
        key = (request.shape.name, request.rank, request.slots, request.kind)
        name = (request.shape.name, request.weight_format)
        if self._table is not None and self._table[0] != key:
            self._table = None
        if self._plain is not None and self._plain[0] != request.shape.name:
            self._plain = None
        if self._quantised is not None and self._quantised[0] != name:
            self._quantised = None
        if self._table is None:
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            check_memory(request, self._device)
        weights = self._weights(request)
        if self._table is None:
            made = random_table(
                request.shape, request.rank, request.slots, request.kind, self._device
            )
            self._table = (key, made)
        return weights, self._table[1]

    def plain(self, request: DecodeRequest) -> ExpertWeights | None:
        """Return bf16 weights to compare a request's format with; None where it has none."""
        return self._unquantised(request.shape) if request.quantised else None

    def _weights(self, request: DecodeRequest) -> ExpertWeights:
        if not request.quantised:
            return self._unquantised(request.shape)
        if self._quantised is None:
            name = (request.shape.name, request.weight_format)
            made = quantised_layer(request.shape, request.weight_format, self._device)
            self._quantised = (name, made)
        return self._quantised[1]

    def _unquantised(self, shape: ModelShape) -> ExpertWeights:
        if self._plain is None:
            self._plain = (shape.name, random_layer(shape, self._device))
        return self._plain[1]


def quantised_layer(
    shape: ModelShape, weight_format: str, device: torch.device, seed: int = 0
) -> ExpertWeights:
    """Return weights of a format, drawn in bf16 and quantised on the device.

    Expert by expert, so that no more than one of them is there in fp32.
    """
    generator = torch.Generator(device).manual_seed(seed)
    one = replace(shape, num_experts=1)
    first = quantise_experts(draw_layer(one, generator), weight_format)
    whole = [_room(part, shape.num_experts) for part in _tensors(first)]
    for expert in range(shape.num_experts):
        made = first if not expert else quantise_experts(draw_layer(one, generator), weight_format)
        for target, part in zip(whole, _tensors(made), strict=True):
            if target is not None and part is not None:
                target[expert].copy_(part[0])
    gate_up, down, gate_up_bias, down_bias, *scales = whole
    assert first.scales is not None and gate_up is not None and down is not None
    assert scales[0] is not None and scales[1] is not None
    return replace(
        first,
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        scales=replace(
            first.scales,
            gate_up=scales[0],
            down=scales[1],
            gate_up_global=scales[2],
            down_global=scales[3],
        ),
    )


def _tensors(weights: ExpertWeights) -> tuple[torch.Tensor | None, ...]:
    """Return all that holds something per expert."""
    plain = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    scales = weights.scales
    assert scales is not None
    return (*plain, scales.gate_up, scales.down, scales.gate_up_global, scales.down_global)


def _room(part: torch.Tensor | None, experts: int) -> torch.Tensor | None:
    return None if part is None else part.new_empty(experts, *part.shape[1:])


def check_memory(request: DecodeRequest, device: torch.device) -> None:
    """Raise :class:`MoegraftError` unless weights and adapters fit a GPU's free memory."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    refuse_too_large(request, free)


def refuse_too_large(request: DecodeRequest, free_bytes: int) -> None:
    """Raise :class:`MoegraftError` when a request needs too much of this many bytes."""
    if request.bytes_needed > _MEMORY_SHARE * free_bytes:
        raise MoegraftError(
            f"{request.title()} needs {request.bytes_needed / 1e9:.1f} GB for weights and "
            f"adapters, {free_bytes / 1e9:.1f} GB are free and a fifth of it is kept for work "
            "buffers: lower --slots or --rank, or take a smaller model."
        )


def check_format(request: DecodeRequest, device: torch.device) -> None:
    """Raise :class:`PlanError` when no backend runs the base in a request's weight format."""
    if not request.quantised:
        return
    shape = request.shape
    activation, layout = style_of(shape)
    make_plan(
        Problem(
            num_tokens=request.tokens,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            gated=layout.gated,
            dtype="bfloat16",
            weight_format=request.weight_format,
            device_type=device.type,
            activation=activation.kind,
        ),
        mode="base",
    )
