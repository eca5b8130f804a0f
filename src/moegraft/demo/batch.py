"""The demo's batch: its rows on a model, greedy, with or without a fixed length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from moegraft.demo.files import Prompt


@dataclass(frozen=True)
class Batch:
    """Rows ready for ``generate``, padded on the left.

    Attributes:
        adapters: adapter name or None, per row.
        input_ids, attention_mask: int64 ``[rows, length]``.
        pad_id: token that fills rows that ended early.
    """

    adapters: tuple[str | None, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    pad_id: int

    @property
    def length(self) -> int:
        """Tokens per row, with padding."""
        return self.input_ids.shape[1]

    def rows_of(self, adapter: str | None) -> list[int]:
        """Return the indices of an adapter's rows."""
        return [i for i, name in enumerate(self.adapters) if name == adapter]

    def select(self, rows: Sequence[int]) -> Batch:
        """Return the batch of some rows, with the padding they have here."""
        index = torch.tensor(list(rows))
        return Batch(
            tuple(self.adapters[i] for i in rows),
            self.input_ids[index],
            self.attention_mask[index],
            self.pad_id,
        )

    def arguments(self, new_tokens: int, *, fixed: bool = False) -> dict[str, Any]:
        """Return keyword arguments of a greedy ``generate``; ``fixed`` forbids an early end."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "max_new_tokens": new_tokens,
            "min_new_tokens": new_tokens if fixed else None,
            "do_sample": False,
            "num_beams": 1,
            "pad_token_id": self.pad_id,
        }


def make_batch(tokenizer: Any, prompts: Sequence[Prompt]) -> Batch:
    """Tokenise prompts into one left-padded batch."""
    encoded = tokenizer(
        [prompt.text for prompt in prompts],
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )
    return Batch(
        tuple(prompt.adapter for prompt in prompts),
        encoded["input_ids"],
        encoded["attention_mask"],
        int(tokenizer.pad_token_id),
    )


class BatchStreamer(BaseStreamer):
    """Calls back with the new token ids of every row after each step.

    transformers' own ``TextStreamer`` takes one row only.

    Args:
        show: called with one list of new ids per row.
    """

    def __init__(self, show: Callable[[list[list[int]]], None]) -> None:
        self._show = show
        self._rows: list[list[int]] | None = None

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts ``[rows, length]`` first, then one new token per row ``[rows]``."""
        if self._rows is None:
            self._rows = [[] for _ in range(value.shape[0])]
            return
        for row, token in zip(self._rows, value.reshape(-1).tolist(), strict=True):
            row.append(token)
        self._show(self._rows)

    def end(self) -> None:
        """Nothing is kept back, so there is nothing to flush."""
