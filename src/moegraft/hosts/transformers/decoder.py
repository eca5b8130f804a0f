"""Greedy decoding of one batch without ``generate``: a prompt, then one graph replay per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from moegraft.adapters import AdapterStore
from moegraft.adapters.batch import RowSlots, normalise_rows, slots_of
from moegraft.errors import MoegraftError, UnsupportedError, shown
from moegraft.graphs import StepRunner
from moegraft.hosts.transformers.decode import StaticDecode
from moegraft.hosts.transformers.limits import why_not_static
from moegraft.hosts.transformers.state import StepState
from moegraft.memory import memory_for
from moegraft.types import TokenSlots

#: Caches are multiples of this many tokens: attention kernels want aligned masks.
_CACHE_STEP = 64


class Decoder:
    """Decodes batches of one size greedily; made by ``graft.decoder``.

    A step is one replay: the forward, the choice of each row's token, and all that the next step
    needs happen on the GPU. Nothing stops at an end-of-text token. The adapters of a batch are
    held in their slots from :meth:`prefill` to the next one, or to :meth:`close`. One thread at a
    time.

    Attributes:
        batch_size: rows.
        max_length: most tokens per row, prompt included.

    Example::

        decoder = graft.decoder(batch_size=2, max_length=64)
        decoder.prefill(input_ids, adapters=["sql", None])
        tokens = decoder.run(16)  # [2, prompt + 17]
    """

    def __init__(
        self,
        model: Any,
        state: StepState,
        store: AdapterStore,
        check_attached: Callable[[], None],
        batch_size: int,
        max_length: int,
        runner: type[StepRunner],
    ) -> None:
        whole = all(type(size) is int for size in (batch_size, max_length))
        if not whole or not 1 <= batch_size < 2**31 or not 2 <= max_length < 2**31:
            raise MoegraftError(
                "A decoder needs at least one row and two tokens, in whole numbers below 2^31; got "
                f"batch_size={shown(batch_size)}, max_length={shown(max_length)}."
            )
        reason = why_not_static(model)
        if reason is not None:
            raise UnsupportedError(f"This model can't decode on static memory: {reason}.")
        self.batch_size = batch_size
        self.max_length = max_length
        self._model = model
        self._store = store
        self._check_attached = check_attached
        self._state = state
        width = -(-max_length // _CACHE_STEP) * _CACHE_STEP
        self._decode = StaticDecode(model, state, store, batch_size, width, runner)
        self._held = ExitStack()
        self._length = 0
        parameter = next(model.parameters())
        what = f"a decoder of {batch_size:,} rows of {max_length:,} tokens"
        with torch.inference_mode(False), memory_for(what):
            self._tokens = torch.zeros(
                batch_size, max_length, dtype=torch.int64, device=parameter.device
            )
            self._seen = torch.zeros(batch_size, width, dtype=torch.bool, device=parameter.device)
            self._ids = self._tokens[:, :1].clone()
            self._positions = torch.zeros_like(self._ids)
            self._column = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        self._mask_dtype = parameter.dtype
        self._float_mask = (
            model.config.get_text_config(decoder=True)._attn_implementation == "eager"
        )

    def prefill(
        self,
        input_ids: torch.Tensor,
        adapters: str | Sequence[str | None] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Start a batch: run its prompts and choose each row's first token.

        Args:
            input_ids: int64 ``[B, S]``, S below ``max_length``; shorter prompts padded on the left.
            adapters: adapter name or None per row; one stands for all.
            attention_mask: ``[B, S]``, 0 where padded; None = no padding.

        Returns:
            The first tokens, int64 ``[B]``.

        The batch before goes on when this one is refused for its tensors, for an unknown name, or
        for more adapters than the bank has slots. Any later error finds it ended: it gives its
        slots to this one, which may fail to get enough of them (other batches and pins hold some),
        room in a fixed arena, or memory; another thread may unload an adapter meanwhile; and the
        model may fail.

        Raises:
            AdapterError: as of ``graft.generate``.
            MoegraftError: other rows than the decoder's, a prompt without room for a token, or no
                tensors of this kind.
        """
        self._check_attached()
        _check_tokens("input_ids", input_ids, "[rows, tokens]")
        rows, length = input_ids.shape
        if rows != self.batch_size or not 0 < length < self.max_length:
            raise MoegraftError(
                f"input_ids are {tuple(input_ids.shape)}; this decoder takes {self.batch_size} "
                f"rows of 1 to {self.max_length - 1} tokens."
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
            raise MoegraftError(
                f"The attention mask is {_described(mask)}, the input_ids {_described(input_ids)}: "
                "one 0 or 1 per token is needed."
            )
        device = self._tokens.device
        names = normalise_rows(adapters, rows)
        self._store.check_batch(names)
        self.close()
        with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
            slot_of = stack.enter_context(self._store.use(names, by_layer=True))
            of_rows = RowSlots(slots_of(names, slot_of), device)
            slots = TokenSlots.of(list(of_rows.slots), device)
            self._decode.reset()
            ids, mask = input_ids.to(device), mask.to(device)
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            with self._state.use_rows(of_rows):  # of the same versions as the steps
                logits = self._prompt_logits(ids, mask, positions)
            self._seen.zero_()
            self._seen[:, :length] = mask.bool()
            self._tokens[:, :length] = ids
            self._positions.copy_(positions[:, -1:])
            self._column.fill_(length - 1)
            token = self._choose(logits)
            runner = self._decode.runner
            if runner is None:
                changed = [self._ids, self._positions, self._column]
                runner = self._decode.make_runner(self._step, {}, changed)
            self._store.wait_for_copies()
            runner.load({}, slots)
            self._held = stack.pop_all()
        self._length = length + 1
        return token

    def step(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step for all rows.

        Args:
            tokens: int64 ``[B]``, what the rows go on with; None = the tokens chosen last.

        Returns:
            The tokens chosen, int64 ``[B]``; overwritten by the next step.

        Raises:
            MoegraftError: no prompt yet, ``max_length`` is reached, or not one token per row.
        """
        runner = self._decode.runner
        if not self._length or runner is None:
            raise MoegraftError("This decoder has no batch: call prefill() first.")
        if self._length >= self.max_length:
            raise MoegraftError(
                f"All {self.max_length} tokens per row are used: make a decoder with a larger "
                "max_length."
            )
        if tokens is not None:
            _check_tokens("tokens", tokens, "[rows]")
            if len(tokens) != self.batch_size:
                raise MoegraftError(
                    f"{len(tokens)} tokens were given for {self.batch_size} rows: one per row."
                )
            with torch.inference_mode(False):
                self._ids.copy_(tokens[:, None])
                self._tokens[:, self._length - 1 : self._length].copy_(tokens[:, None])
        with torch.no_grad():
            chosen = runner.execute()
        self._length += 1
        assert isinstance(chosen, torch.Tensor)
        return chosen

    def run(self, num_steps: int) -> torch.Tensor:
        """Run several steps; return :attr:`tokens`."""
        if type(num_steps) is not int or num_steps < 0:
            raise MoegraftError(f"num_steps={shown(num_steps)} is no number of steps.")
        for _ in range(num_steps):
            self.step()
        return self.tokens

    @property
    def tokens(self) -> torch.Tensor:
        """All tokens so far, prompts included, int64 ``[B, length]``; a view that steps extend."""
        return self._tokens[:, : self._length]

    def close(self) -> None:
        """Let the batch's adapters go; a new :meth:`prefill` starts the next batch.

        ``graft.detach()`` closes decoders, and they start no batch after it.
        """
        self._length = 0
        self._held.close()

    def _prompt_logits(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        only_last = {"logits_to_keep": 1} if self._model._supports_logits_to_keep() else {}
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._decode.cache,
            use_cache=True,
            **only_last,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _step(self, inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None) -> torch.Tensor:
        """One step; everything it needs and changes is in static memory."""
        self._seen.index_fill_(1, self._column, True)
        mask = self._seen[:, None, None, :]
        if self._float_mask:
            empty = torch.zeros(mask.shape, dtype=self._mask_dtype, device=mask.device)
            mask = empty.masked_fill_(~mask, torch.finfo(self._mask_dtype).min)
        step = {"input_ids": self._ids, "position_ids": self._positions, "attention_mask": mask}
        return self._choose(self._decode.logits(self._model.forward, step, slots, {}))

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Pick each row's most likely token ``[B]`` and set up the next step with it."""
        token = logits[:, -1].argmax(-1)
        self._column.add_(1)
        self._positions.add_(1)
        self._tokens.index_copy_(1, self._column, token[:, None])
        self._ids.copy_(token[:, None])
        return token


def _check_tokens(name: str, given: object, shape: str) -> None:
    """Raise :class:`MoegraftError` unless ``given`` holds token ids in as many dimensions."""
    ids = (torch.int64, torch.int32)
    if (
        not isinstance(given, torch.Tensor)
        or given.dtype not in ids
        or given.dim() != len(shape.split(","))
    ):
        raise MoegraftError(f"{name} must be token ids, int64 {shape}; got {_described(given)}.")


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return shown(value)
