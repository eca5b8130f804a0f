"""Generation and scoring with one adapter (or none) per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moegraft.adapters import AdapterStore
from moegraft.adapters.batch import RowSlots, normalise_rows, slots_of
from moegraft.errors import AdapterError
from moegraft.hosts.transformers.state import StepState

Adapters = str | None | Sequence[str | None]


class Generation:
    """The part of :class:`moegraft.hosts.transformers.attach.Graft` that runs the model."""

    model: Any
    store: AdapterStore
    _state: StepState

    def generate(self, *args: Any, adapters: Adapters = None, **kwargs: Any) -> Any:
        """``model.generate`` with one adapter name, or None for the base model, per input row.

        Args:
            *args, **kwargs: passed to ``model.generate``. Pass ``attention_mask`` whenever rows
                are padded.
            adapters: one entry per row of the input; a single name or None stands for all rows.

        Returns:
            What ``model.generate`` returns.

        Raises:
            AdapterError: an unknown name, a number of entries that is not the number of rows, or
                more different adapters than slots. Nothing has run then.
        """
        with self.rows(adapters, _num_rows(args, kwargs)):
            return self.model.generate(*args, **kwargs)

    def forward(self, *args: Any, adapters: Adapters = None, **kwargs: Any) -> Any:
        """One forward of the model (scoring), without gradients; otherwise as :meth:`generate`."""
        with self.rows(adapters, _num_rows(args, kwargs)), torch.no_grad():
            return self.model(*args, **kwargs)

    @contextmanager
    def rows(self, adapters: Adapters, num_rows: int) -> Iterator[None]:
        """Within the block, every forward of the model uses these adapters for its rows.

        The adapters are held in their slots until the block ends. Applies to this thread only.
        Call the attached model itself: a part of it, called alone, raises.
        """
        self._check_attached()
        names = normalise_rows(adapters, num_rows)
        with self.store.use(names) as slot_of:
            device = next(self.model.parameters()).device
            with self._state.use_rows(RowSlots(slots_of(names, slot_of), device)):
                yield

    def _check_attached(self) -> None:
        raise NotImplementedError


def _num_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    for name in ("input_ids", "inputs", "inputs_embeds"):
        if kwargs.get(name) is not None:
            return _first_size(kwargs[name], name)
    if args and args[0] is not None:
        return _first_size(args[0], "the first argument")
    raise AdapterError("Pass input_ids (or inputs_embeds): the rows that adapters are for.")


def _first_size(inputs: Any, name: str) -> int:
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2 or not inputs.shape[0]:
        found = tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise AdapterError(
            f"{name} must be a tensor [rows, tokens] (or [rows, tokens, hidden]) with at least one "
            f"row, got {found}."
        )
    return int(inputs.shape[0])
