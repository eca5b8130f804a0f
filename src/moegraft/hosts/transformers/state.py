"""Which adapter slot each token of the running forward uses: the top hook sets, layers read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from moegraft.adapters.batch import RowSlots
from moegraft.errors import MoegraftError
from moegraft.types import TokenSlots


class _Step(NamedTuple):
    """One running forward: its tokens' slots (None = base), its batch, the forward around it."""

    slots: TokenSlots | None
    batch: int
    outer: _Step | None


class StepState:
    """Per-thread state of one attached model.

    ``generate`` or ``forward`` sets the slots of the batch's *rows*; the hook on the top model
    spreads them over the *tokens* of every forward inside. Context variables keep threads apart,
    so two threads may run the same model at once; forwards inside forwards nest.
    """

    def __init__(self) -> None:
        self._rows: ContextVar[RowSlots | None] = ContextVar("moegraft_rows", default=None)
        self._step: ContextVar[_Step | None] = ContextVar("moegraft_step", default=None)
        self._running = threading.local()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MoegraftError(
            "An attached model can't be copied or pickled: detach() first, or use "
            "save_pretrained()."
        )

    @contextmanager
    def use_rows(self, rows: RowSlots) -> Iterator[None]:
        """Use these slots for the rows of every forward in the block.

        Whatever ends the block, an interrupt of the user included, nothing of it stays behind.
        """
        rows_token, step_token = self._rows.set(rows), self._step.set(self._step.get())
        modes = len(self._modes)
        try:
            yield
        finally:
            while len(self._modes) > modes:
                self.leave_mode()
            self._step.reset(step_token)
            self._rows.reset(rows_token)

    @contextmanager
    def use_step(self, slots: TokenSlots | None, batch: int) -> Iterator[None]:
        """Run a forward of one token per row with exactly these slots, as a captured graph does."""
        token = self._step.set(_Step(slots, batch, self._step.get()))
        try:
            yield
        finally:
            self._step.reset(token)

    @property
    def current(self) -> TokenSlots | None:
        """Slots of the running forward's tokens; None = base only.

        Raises:
            MoegraftError: a part of the model runs by itself although adapters were asked for.
        """
        step = self._step.get()
        if step is not None:
            return step.slots
        if self._rows.get() is not None:
            raise MoegraftError(
                "A part of the attached model was called by itself, so its tokens' adapters are "
                "unknown: within rows(), call the model that attach() got."
            )
        return None

    def slots_of(self, x: torch.Tensor) -> TokenSlots | None:
        """Slots of the rows of ``x`` ``[batch, .., in]``, the input of some linear.

        As a rule these are the forward's tokens; a linear that runs over the whole cache (the
        ``kv_b_proj`` of latent attention) has more of them, still in the order of the batch.
        """
        current, rows, step = self.current, self._rows.get(), self._step.get()
        num_rows = x.shape[:-1].numel()
        if current is None or step is None or num_rows == current.num_tokens:
            return current
        if x.dim() < 3 or x.shape[0] != step.batch:
            return current  # the layer says that the numbers differ
        if rows is None or current.in_graph:
            return _repeated(current, num_rows)
        return rows.spread(x.shape[0], num_rows // x.shape[0])

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Forward pre-hook of the top model: spread the rows' slots over this forward's tokens."""
        rows, outer = self._rows.get(), self._step.get()
        if rows is None:
            self._step.set(_Step(None, 0, outer))
            return
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        if inputs is None and args:
            inputs = args[0]
        assert inputs is not None, "a forward without input_ids and inputs_embeds"
        slots = rows.spread(inputs.shape[0], inputs.shape[1])
        self._step.set(_Step(slots, inputs.shape[0], outer))

    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the top model, also after an error: no slot outlives its forward."""
        step = self._step.get()
        self._step.set(None if step is None else step.outer)

    def enter_mode(self, mode: TorchFunctionMode) -> None:
        """Activate a torch function mode of a router's forward."""
        mode.__enter__()
        self._modes.append(mode)

    def leave_mode(self) -> None:
        """Deactivate the last mode."""
        self._modes.pop().__exit__(None, None, None)

    @property
    def _modes(self) -> list[TorchFunctionMode]:
        """This thread's active modes, the last one last."""
        if not hasattr(self._running, "modes"):
            self._running.modes = []
        modes: list[TorchFunctionMode] = self._running.modes
        return modes


def _repeated(slots: TokenSlots, num_rows: int) -> TokenSlots:
    """Slots of one token per row, spread over ``num_rows`` in the order of the batch."""
    each = num_rows // max(slots.num_tokens, 1)
    spread = slots.slots[:, None].expand(-1, each).reshape(-1)
    return TokenSlots(spread, slots.live, in_graph=slots.in_graph)
