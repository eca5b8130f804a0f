"""vLLM's punica wrappers with :class:`StepSlots`, by the dotted name that vLLM loads them by."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.punica_wrapper import punica_cpu, punica_gpu

from moegraft.hosts.vllm.steps import StepSlots

logger = logging.getLogger("vllm.moegraft")
#: Any number of an adapter.
_SAMPLE = 7


class PunicaWrapperCPU(StepSlots, punica_cpu.PunicaWrapperCPU):
    """The CPU's."""


class PunicaWrapperGPU(StepSlots, punica_gpu.PunicaWrapperGPU):
    """The one for CUDA, which makes a step's metadata on the host.

    vLLM looks up each row's slot in a loop of Python, 2 to 4 ms for 8192 rows, and then has the
    device count what the host knew, so that it waits for the step before. What is written here is
    the same; in a version that keeps something else, which a sample step tells, vLLM's own way is
    taken.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._moegraft_on_host = False
        self._moegraft_on_host = self._agrees()
        self._forget()

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Take the next step's mapping."""
        rows = None
        if self._moegraft_on_host:
            rows = slots_of(mapping.index_mapping, lora_index_to_id)
        samples = None if rows is None else slots_of(mapping.prompt_mapping, lora_index_to_id)
        if rows is None or samples is None:
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
            return
        self._forget()
        self.is_prefill = mapping.is_prefill
        self._write(rows, samples, max_loras, vocab_size)

    def _write(
        self, rows: np.ndarray, samples: np.ndarray, max_loras: int, vocab_size: int
    ) -> None:
        count = len(samples)
        places = np.where(samples < 0, max_loras - 1, samples).astype(np.int64)
        self._copy(self._token_lora_indices, rows)
        self._copy(self._sampler_indices, samples)
        self._copy(self._sampler_indices_padded, places * count + np.arange(count))
        embeddings = self._embeddings_indices
        if embeddings.dim() == 2:  # older versions: first a row for added vocabulary, all 0
            embeddings[0, : len(rows)] = 0
            embeddings = embeddings[1]
        self._copy(embeddings, np.maximum(rows, 0).astype(np.int64) * vocab_size)
        self.indices_len[:] = [len(rows), count, count, len(rows)]
        self.token_mapping_meta.prepare_tensors(self._on_host(rows))
        self.prompt_mapping_meta.prepare_tensors(self._on_host(samples))

    def _on_host(self, values: np.ndarray) -> torch.Tensor:
        """Return what can be copied from without a wait for the device."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._token_lora_indices.is_cuda else tensor

    def _copy(self, to: torch.Tensor, values: np.ndarray) -> None:
        source = self._on_host(values.astype(np.int64))
        to[: len(values)].copy_(source, non_blocking=True)

    def _agrees(self) -> bool:
        """Return True when a sample step leaves the same behind in both ways."""
        slots = [_SAMPLE, *[None] * (self.max_loras - 1)]
        rows, samples = (0, _SAMPLE, _SAMPLE), (_SAMPLE, 0)
        try:
            mapping = LoRAMapping(rows, samples, is_prefill=True)
            super().update_metadata(mapping, slots, self.max_loras + 1, 64)
            stock = self._state()
            self._forget()
            row_slots, sample_slots = slots_of(rows, slots), slots_of(samples, slots)
            assert row_slots is not None and sample_slots is not None
            self._write(row_slots, sample_slots, self.max_loras + 1, 64)
            ours = self._state()
            same = stock.keys() == ours.keys() and all(
                torch.equal(ours[name], tensor) for name, tensor in stock.items()
            )
        except Exception as error:  # a version that is made otherwise
            logger.debug("Metadata of steps can't be made on the host: %r", error)
            return False
        logger.debug("Metadata of steps made on the host: %s", same)
        return same

    def _state(self) -> dict[tuple[int, str], torch.Tensor]:
        holders = (self, self.token_mapping_meta, self.prompt_mapping_meta)
        found = {
            (i, name): value.clone()
            for i, holder in enumerate(holders)
            for name, value in vars(holder).items()
            if isinstance(value, torch.Tensor)
        }
        return found | {(len(holders), "lengths"): torch.tensor(self.indices_len)}


def slots_of(ids: Sequence[int], slots: Sequence[int | None]) -> np.ndarray | None:
    """Return int32 the slot of each row, -1 = none; None when an adapter is in no slot.

    Args:
        ids: vLLM's number of each row's adapter, 0 = none.
        slots: which adapter each slot holds.
    """
    wanted = np.fromiter(ids, np.int64, len(ids))
    slot_of = {held: slot for slot, held in enumerate(slots) if held is not None}
    found = np.full(len(wanted), -1, np.int32)
    for adapter in np.unique(wanted).tolist():
        if adapter > 0:
            if adapter not in slot_of:
                return None
            found[wanted == adapter] = slot_of[adapter]
    return found


#: Dotted name of a stock wrapper -> the class that takes its place.
OURS: dict[str, type[StepSlots]] = {
    "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU": PunicaWrapperCPU,
    "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU": PunicaWrapperGPU,
}
