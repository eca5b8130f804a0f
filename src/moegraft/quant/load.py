"""Read one layer's experts from a checkpoint straight into the storage that layers run from."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from moegraft.errors import MoegraftError
from moegraft.quant.checkpoint import Checkpoint, Progress, StoredExperts, matrices_of
from moegraft.quant.formats import FORMATS, UNQUANTIZED, WeightFormat
from moegraft.quant.matrices import QuantisedMatrix
from moegraft.types import Activation, ExpertWeights, WeightLayout, WeightScales


class _Buffers(NamedTuple):
    """One side's tensors, ``[E, ..]``; None where the format has none."""

    values: torch.Tensor
    scales: torch.Tensor | None
    whole: torch.Tensor | None
    bias: torch.Tensor | None


def load_experts(
    checkpoint: Checkpoint,
    stored: StoredExperts,
    layout: WeightLayout,
    activation: Activation | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    weight_format: str | None = None,
    progress: Progress | None = None,
) -> ExpertWeights:
    """Read one layer's experts; each tensor is read once and copied to its place.

    Args:
        checkpoint: where they are.
        stored: which, from :meth:`Checkpoint.experts`.
        layout: how the model orders gate and up. Fused tensors are taken to be in that order,
            single ones are put into it.
        activation: between gate_up and down; None = SiLU.
        dtype: of the activations and biases; of the weights too where they aren't quantised.
        device: where to.
        weight_format: another format of the same values, such as ``fp8-block-w8a16``; None = as
            stored.
        progress: called with (matrices read, matrices in all).

    Raises:
        MoegraftError: sizes that disagree, or a ``weight_format`` of other values.
    """
    name = _checked_format(stored, weight_format)
    layout = _layout(stored, layout)
    reader = _Reader(checkpoint, stored, FORMATS.get(name), dtype, torch.device(device), progress)
    sides = stored.parts[:-1] if layout.gate_up_order != "up_first" else stored.parts[-2::-1]
    gate_up, down = reader.read(sides), reader.read(("down",))
    scales = None
    if name != UNQUANTIZED:
        assert gate_up.scales is not None and down.scales is not None
        whole = None if down.whole is None else down.whole.reshape(-1)
        scales = WeightScales(gate_up.scales, down.scales, gate_up.whole, whole, dtype)
    return ExpertWeights(
        gate_up.values,
        down.values,
        gate_up.bias,
        down.bias,
        activation or Activation(),
        layout,
        name,
        scales,
    )


def _checked_format(stored: StoredExperts, wanted: str | None) -> str:
    if wanted is None or wanted == stored.weight_format:
        return stored.weight_format
    found, other = FORMATS.get(stored.weight_format), FORMATS.get(wanted)
    if (
        found is None
        or other is None
        or replace(found, name="", title="")
        != replace(other, name="", title="", activation_group=found.activation_group)
    ):
        raise MoegraftError(
            f"{stored.path} is stored as {stored.weight_format}, which can't be read as {wanted!r}."
        )
    return wanted


def _layout(stored: StoredExperts, layout: WeightLayout) -> WeightLayout:
    gated = "up" not in stored.parts or "gate" in stored.parts
    if gated != layout.gated:
        raise MoegraftError(
            f"{stored.path} holds {', '.join(stored.parts)}, but the model's experts have "
            f"{'a' if layout.gated else 'no'} gate."
        )
    if stored.weight_format != UNQUANTIZED or not stored.fused:
        layout = replace(layout, out_major=True)
    if not stored.fused and layout.gate_up_order == "interleaved":
        raise MoegraftError(
            f"{stored.path} has tensors of single experts, but the model's gate and up lie row by "
            "row; only fused tensors are read into that order."
        )
    return layout


class _Reader:
    """Reads the matrices of one layer into buffers for all experts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: StoredExperts,
        weight_format: WeightFormat | None,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._format = weight_format
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._done, self._total = 0, sum(1 for _ in matrices_of(stored))

    def read(self, parts: tuple[str, ...]) -> _Buffers:
        """Read parts that lie one after the other, such as gate and up."""
        if self._stored.fused:
            matrix, bias = self._matrix(None, parts[0])
            return self._whole(matrix, bias)
        buffers: _Buffers | None = None
        for expert in range(self._stored.num_experts):
            for i, part in enumerate(parts):
                matrix, bias = self._matrix(expert, part)
                if buffers is None:
                    buffers = self._empty(matrix, bias, len(parts))
                self._place(buffers, matrix, bias, expert, i, f"expert {expert}'s {part}")
        assert buffers is not None
        return buffers

    def _matrix(self, expert: int | None, part: str) -> tuple[QuantisedMatrix, torch.Tensor | None]:
        keys = self._stored.leaves(expert, part)
        tensors = {leaf: self._checkpoint.get(key) for leaf, key in keys.items()}
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
        bias = tensors.pop("bias", None)
        matrix = self._stored.layout.read(tensors)
        if self._format is None:
            matrix = QuantisedMatrix(matrix.values.to(self._dtype), matrix.scales, None)
        return matrix, None if bias is None else bias.to(self._dtype)

    def _whole(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> _Buffers:
        scales = None if self._format is None else matrix.scales.to(self._device).contiguous()
        whole = None if matrix.global_scale is None else matrix.global_scale.to(self._device)
        bias = None if bias is None else bias.to(self._device)
        return _Buffers(matrix.values.to(self._device).contiguous(), scales, whole, bias)

    def _empty(self, matrix: QuantisedMatrix, bias: torch.Tensor | None, parts: int) -> _Buffers:
        experts = self._stored.num_experts

        def like(tensor: torch.Tensor) -> torch.Tensor:
            shape = (experts, parts * tensor.shape[0], *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device=self._device)

        whole = torch.empty(experts, parts, device=self._device)
        return _Buffers(
            like(matrix.values),
            None if self._format is None else like(matrix.scales),
            None if matrix.global_scale is None else whole,
            None if bias is None else like(bias),
        )

    def _place(
        self,
        buffers: _Buffers,
        matrix: QuantisedMatrix,
        bias: torch.Tensor | None,
        expert: int,
        index: int,
        what: str,
    ) -> None:
        pairs = [(buffers.values, matrix.values)]
        if buffers.scales is not None:
            pairs.append((buffers.scales, matrix.scales))
        if buffers.whole is not None and matrix.global_scale is not None:
            buffers.whole[expert, index] = matrix.global_scale.to(self._device)
        if (buffers.bias is None) != (bias is None):
            raise MoegraftError(f"{self._stored.path}: only some matrices have a bias ({what}).")
        if buffers.bias is not None and bias is not None:
            pairs.append((buffers.bias, bias))
        for buffer, tensor in pairs:
            rows = tensor.shape[0]
            room = buffer[expert, index * rows : (index + 1) * rows]
            if room.shape != tensor.shape or buffer.dtype != tensor.dtype:
                raise MoegraftError(
                    f"{self._stored.path}: {what} has {tensor.dtype} {list(tensor.shape)}, another "
                    f"one {buffer.dtype} {list(room.shape)}."
                )
            room.copy_(tensor)
