"""From adapter names per row to slots per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moegraft.errors import AdapterError, shown
from moegraft.types import TokenSlots

#: Shapes whose spread slots are kept; linears over a growing cache bring a new one at every step.
_KEPT_SHAPES = 4


class RowSlots:
    """The slots of a batch's rows, spread over the tokens of each forward.

    Spreading is cached for the last few shapes: a decode loop pays for it once.

    Args:
        slots: slot per row, -1 = base.
        device: where the model's activations are.

    Example: rows ``[2, -1]`` for a forward of 4 rows (two beams each) by 3 tokens give
    ``[2]*6 + [-1]*6``.
    """

    def __init__(self, slots: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.slots = tuple(slots)
        self._device = torch.device(device)
        self._cache: dict[tuple[int, int], TokenSlots] = {}

    def spread(self, rows: int, tokens_per_row: int) -> TokenSlots:
        """Return the slots of ``rows * tokens_per_row`` flattened tokens.

        Raises:
            AdapterError: the forward's rows are no whole multiple of the batch's rows.
        """
        key = (rows, tokens_per_row)
        found = self._cache.pop(key, None)
        if found is None:
            repeat, rest = divmod(rows, max(len(self.slots), 1))
            if rest or not repeat or not self.slots:
                raise AdapterError(
                    f"The forward has {rows} rows, but adapters were given for {len(self.slots)}: "
                    "each row (or group of beams) needs one adapter name or None."
                )
            # Kept for later steps, which need not be in the inference mode that this one is in.
            with torch.inference_mode(False):
                per_row = torch.tensor(self.slots, dtype=torch.int32, device=self._device)
                per_token = per_row.repeat_interleave(repeat * tokens_per_row)
            live = tuple(sorted({slot for slot in self.slots if slot >= 0}))
            found = TokenSlots(per_token, live)
            while len(self._cache) >= _KEPT_SHAPES:
                del self._cache[next(iter(self._cache))]
        self._cache[key] = found  # the last used comes last
        return found


def normalise_rows(
    adapters: str | Sequence[str | None] | None, num_rows: int
) -> tuple[str | None, ...]:
    """Return one adapter name or None per row; a single name or None stands for all rows.

    Raises:
        AdapterError: no list of names, or not as many as there are rows.
    """
    if not isinstance(num_rows, int) or isinstance(num_rows, bool) or not 0 <= num_rows < 2**31:
        raise AdapterError(f"num_rows={shown(num_rows)} is no number of rows.")
    if adapters is None or isinstance(adapters, str):
        return (adapters,) * num_rows
    if not isinstance(adapters, (list, tuple)) or not all(
        name is None or isinstance(name, str) for name in adapters
    ):
        raise AdapterError(
            f"adapters={shown(adapters)} is no list of names: pass one name or None per row, in "
            "order."
        )
    names = tuple(adapters)
    if len(names) != num_rows:
        raise AdapterError(
            f"The batch has {num_rows} rows but {len(names)} adapters were given: pass one name or "
            "None per row."
        )
    return names


def slots_of(names: Sequence[str | None], slot_of: Mapping[str, int]) -> tuple[int, ...]:
    """Return the slot of each row; -1 for None."""
    return tuple(-1 if name is None else slot_of[name] for name in names)
