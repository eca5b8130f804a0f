"""Which adapter slot each token of the running forward uses: the top hook sets, layers read."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

from moegraft.adapters.batch import RowSlots
from moegraft.types import TokenSlots


class StepState:
    """Per-thread state of one attached model.

    ``generate`` or ``forward`` sets the slots of the batch's *rows*; the hook on the top model
    spreads them over the *tokens* of every forward inside. Context variables keep threads apart,
    so two threads may run the same model at once.
    """

    def __init__(self) -> None:
        self.rows: ContextVar[RowSlots | None] = ContextVar("moegraft_rows", default=None)
        self._step: ContextVar[TokenSlots | None] = ContextVar("moegraft_step", default=None)
        self._batch: ContextVar[int] = ContextVar("moegraft_batch", default=0)

    @property
    def current(self) -> TokenSlots | None:
        """Slots of the running forward's tokens; None = base only."""
        return self._step.get()

    def slots_of(self, x: torch.Tensor) -> TokenSlots | None:
        """Slots of the rows of ``x`` ``[batch, .., in]``, the input of some linear.

        As a rule these are the forward's tokens; a linear that runs over the whole cache (the
        ``kv_b_proj`` of latent attention) has more of them, still in the order of the batch.
        """
        current, rows = self._step.get(), self.rows.get()
        num_rows = x.shape[:-1].numel()
        if current is None or rows is None or num_rows == current.num_tokens:
            return current
        if x.dim() < 3 or x.shape[0] != self._batch.get():
            return current  # the layer says that the numbers differ
        return rows.spread(x.shape[0], num_rows // x.shape[0])

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Forward pre-hook of the top model: spread the rows' slots over this forward's tokens."""
        rows = self.rows.get()
        if rows is None:
            self._step.set(None)
            return
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        if inputs is None and args:
            inputs = args[0]
        assert inputs is not None, "a forward without input_ids and inputs_embeds"
        self._batch.set(inputs.shape[0])
        self._step.set(rows.spread(inputs.shape[0], inputs.shape[1]))

    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the top model, also after an error: no slot outlives its forward."""
        self._step.set(None)
