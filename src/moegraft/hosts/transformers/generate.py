"""Generation and scoring with one adapter (or none) per row."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moegraft.adapters import AdapterBank, AdapterStore
from moegraft.adapters.batch import RowSlots, normalise_rows, slots_of
from moegraft.errors import AdapterError, MoegraftError, UnsupportedError, shown
from moegraft.graphs import StepRunner
from moegraft.hosts.transformers.agreement import HeldRows, agreed
from moegraft.hosts.transformers.decoder import Decoder
from moegraft.hosts.transformers.graphed import GraphedGenerate
from moegraft.hosts.transformers.state import StepState
from moegraft.parallel import RankShards

Adapters = str | None | Sequence[str | None]


class Generation:
    """The part of :class:`moegraft.hosts.transformers.attach.Graft` that runs the model."""

    model: Any
    store: AdapterStore
    bank: AdapterBank
    _state: StepState
    _shards: RankShards | None
    #: None where decoding can't be captured: on a CPU.
    _graphed: GraphedGenerate | None = None

    def __init__(self) -> None:
        self._decoders: weakref.WeakSet[Decoder] = weakref.WeakSet()

    def generate(
        self, *args: Any, adapters: Adapters = None, graphs: bool | None = None, **kwargs: Any
    ) -> Any:
        """``model.generate`` with one adapter name, or None for the base model, per input row.

        Args:
            *args, **kwargs: passed to ``model.generate``. Pass ``attention_mask`` whenever rows
                are padded.
            adapters: one entry per row of the input; a single name or None stands for all rows.
            graphs: None = on a GPU decode steps are replayed as CUDA graphs where that is possible,
                and where it is not, one line of the log says why. False = never. True = or raise.

        Returns:
            What ``model.generate`` returns. With graphs its attention runs over a static cache, as
            with ``cache_implementation="static"``, which may round differently.

        Raises:
            AdapterError: an unknown name, a number of entries that is not the number of rows, or
                more different adapters than slots. Nothing has run then.
            UnsupportedError: ``graphs=True``, and graphs are not possible.
        """
        _check_graphs(graphs)
        with self.rows(adapters, _num_rows(args, kwargs)):
            if graphs is not False and self._graphed is not None:
                reason = self._graphed.why_not(args, kwargs)
                if reason is None:
                    return self._graphed.generate(args, kwargs, must=graphs is True)
                if graphs is None:
                    self._graphed.say(reason)
            else:
                reason = "the model is not on a GPU"
            if graphs is True:
                raise UnsupportedError(f"generate(graphs=True): {reason}.")
            if self.bank.device.type == "cuda":
                # transformers would compile a model whose slots live in hooks.
                kwargs.setdefault("disable_compile", True)
            return self.model.generate(*args, **kwargs)

    def forward(self, *args: Any, adapters: Adapters = None, **kwargs: Any) -> Any:
        """One forward of the model (scoring), without gradients; otherwise as :meth:`generate`."""
        with self.rows(adapters, _num_rows(args, kwargs)), torch.no_grad():
            return self.model(*args, **kwargs)

    def decoder(self, batch_size: int, max_length: int, *, graphs: bool | None = None) -> Decoder:
        """Return a :class:`Decoder`: greedy decoding of one batch, one graph replay per token.

        Args:
            batch_size: rows of its batches.
            max_length: most tokens per row, prompt included.
            graphs: None = on a GPU; False = the same steps without graphs; True = or raise.

        Raises:
            UnsupportedError: the model can't decode on static memory, or ``graphs=True`` on a CPU.
        """
        self._check_attached()
        _check_graphs(graphs)
        if graphs is None:
            graphs = self._graphed is not None
        if graphs and self._graphed is None:
            raise UnsupportedError("decoder(graphs=True): the model is not on a GPU.")
        runner = self._graphed.runner if graphs and self._graphed is not None else StepRunner
        check = self._check_attached
        decoder = Decoder(
            self.model, self._state, self.store, check, batch_size, max_length, runner
        )
        self._decoders.add(decoder)
        return decoder

    def _use_graphs(self, runner: type[StepRunner]) -> None:
        """Let generate run its decode steps with ``runner`` from now on."""
        if self._graphed is not None:
            self._graphed.close()
        self._graphed = GraphedGenerate(self.model, self._state, self.store, runner)

    def _drop_graphs(self) -> None:
        """Free graphs and static caches; decoders end."""
        if self._graphed is not None:
            self._graphed.close()
            self._graphed = None
        for decoder in list(self._decoders):
            decoder.close()

    @contextmanager
    def rows(self, adapters: Adapters, num_rows: int) -> Iterator[None]:
        """Within the block, every forward of the model uses these adapters for its rows.

        The adapters are held in their slots until the block ends. Applies to this thread only.
        Call the attached model itself: a part of it, called alone, raises.
        """
        self._check_attached()
        hold = self._hold(adapters, num_rows)
        with hold if self._shards is None else agreed(hold) as held:
            device = next(self.model.parameters()).device
            with self._state.use_rows(RowSlots(slots_of(held.names, held.slots), device)):
                yield

    @contextmanager
    def _hold(self, adapters: Adapters, num_rows: int) -> Iterator[HeldRows]:
        names = normalise_rows(adapters, num_rows)
        with self.store.use(names, by_layer=True) as slot_of:
            yield HeldRows(names, slot_of)

    def _check_attached(self) -> None:
        raise NotImplementedError


def _check_graphs(graphs: object) -> None:
    if graphs is not None and not isinstance(graphs, bool):
        raise MoegraftError(f"graphs={shown(graphs)} is not True, False or None.")


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
