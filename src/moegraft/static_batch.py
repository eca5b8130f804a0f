"""Batches of any size in buffers that never move: which bucket, and what the rows beyond hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moegraft.errors import MoegraftError
from moegraft.types import TokenSlots

_SLOTS = "slots"


@dataclass(frozen=True)
class StaticInput:
    """One input of a step: ``[T, *row_shape]``.

    Attributes:
        row_shape: shape of one row.
        dtype: its dtype; inputs are cast to it.
        pad: what rows beyond the batch hold; None = anything, they have no effect.

    Example: ``topk_ids`` of 8 experts per token are ``StaticInput((8,), torch.int32, -1)``.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    pad: float | None = None


class StaticBatch:
    """The static buffers of a step, for batches of up to the largest bucket.

    All buckets share one buffer per input: a bucket of T rows is its first T rows. Rows between
    the batch and its bucket hold each input's pad value and slot -1.

    Args:
        inputs: name -> what it looks like.
        buckets: numbers of rows that the step is prepared for.
        device: where the buffers are.

    Raises:
        MoegraftError: no bucket, or one that is no whole number above 0.
    """

    def __init__(
        self,
        inputs: Mapping[str, StaticInput],
        buckets: Sequence[int],
        device: torch.device | str,
    ) -> None:
        whole = isinstance(buckets, Sequence) and all(type(rows) is int for rows in buckets)
        if not whole or not buckets or min(buckets) < 1:
            raise MoegraftError(
                f"buckets={buckets!r}: at least one number of rows above 0, all of them int."
            )
        self.buckets = tuple(sorted(set(buckets)))
        self._inputs = {**inputs, _SLOTS: StaticInput((), torch.int32, -1)}
        rows = self.buckets[-1]
        with torch.inference_mode(False):
            self._buffers = {
                name: torch.full((rows, *spec.row_shape), spec.pad or 0, dtype=spec.dtype).to(
                    device
                )
                for name, spec in self._inputs.items()
            }
        #: Rows of each buffer that may hold something else than the pad value.
        self._filled = dict.fromkeys(self._buffers, 0)
        self._slots: TokenSlots | None = None

    def bucket_of(self, num_tokens: int) -> int:
        """Return the smallest bucket for a batch of T rows; MoegraftError when none is enough."""
        at = bisect_left(self.buckets, num_tokens)
        if at == len(self.buckets):
            raise MoegraftError(
                f"A batch of {num_tokens} rows is over the largest bucket of {self.buckets[-1]}: "
                "prepare a larger one, or run the step itself."
            )
        return self.buckets[at]

    def load(self, inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None) -> int:
        """Copy a batch into the buffers; return its number of rows.

        Args:
            inputs: name -> ``[T, ..]``; inputs that are left out stay as they are.
            slots: adapter slot per row; None = base only. The same object again is not copied.

        Raises:
            MoegraftError: an unknown name, a shape that is not ``[T, *row_shape]``, a dtype that
                loses its kind (float to int), different T, or more rows than the largest bucket.
                Nothing was copied then.
        """
        num_tokens = self._check(inputs, slots)
        for name, value in inputs.items():
            self._fill(name, value)
        if slots is not None and slots is not self._slots:
            self._fill(_SLOTS, slots.slots)
            self._slots = slots
        return num_tokens

    def _check(self, inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None) -> int:
        sizes = {name: value.shape[0] if value.dim() else 0 for name, value in inputs.items()}
        if slots is not None:
            if not isinstance(slots, TokenSlots) or slots.slots.dim() != 1:
                raise MoegraftError(
                    "slots are no TokenSlots of one slot per row; TokenSlots.of makes them."
                )
            sizes[_SLOTS] = slots.num_tokens
        if len(set(sizes.values())) != 1:
            raise MoegraftError(f"The inputs must have one number of rows; got {sizes}.")
        for name, value in inputs.items():
            spec = self._inputs.get(name)
            if spec is None or name == _SLOTS:
                known = ", ".join(key for key in self._inputs if key != _SLOTS)
                raise MoegraftError(f"There is no input {name!r}; the step has {known}.")
            if not value.dim() or tuple(value.shape[1:]) != spec.row_shape:
                raise MoegraftError(
                    f"{name} has shape {tuple(value.shape)}; expected [T, "
                    f"{', '.join(str(size) for size in spec.row_shape)}]."
                )
            _check_cast(name, value.dtype, spec.dtype)
        if slots is not None:
            _check_cast(_SLOTS, slots.slots.dtype, torch.int32)
        num_tokens = next(iter(sizes.values()))
        self.bucket_of(num_tokens)
        return num_tokens

    def _fill(self, name: str, value: torch.Tensor) -> None:
        buffer, pad, rows = self._buffers[name], self._inputs[name].pad, value.shape[0]
        buffer[:rows].copy_(value, non_blocking=True)
        if pad is not None and rows < self._filled[name]:
            buffer[rows : self._filled[name]].fill_(pad)
        self._filled[name] = rows

    def views(self, bucket: int) -> dict[str, torch.Tensor]:
        """Return the inputs' first ``bucket`` rows; the buffers themselves."""
        return {name: buffer[:bucket] for name, buffer in self._buffers.items() if name != _SLOTS}

    def slots(self, bucket: int) -> torch.Tensor:
        """Return the first ``bucket`` slots, int32; the buffer itself."""
        return self._buffers[_SLOTS][:bucket]


def _check_cast(name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    if not torch.can_cast(found, wanted):
        raise MoegraftError(f"{name} is {found}; the step takes {wanted}, which can't hold it.")
