"""A model's decode forward (one new token per row) on static memory, so that a graph can hold it.

What a forward depends on at each step comes in as tensors: token ids, positions and the attention
mask over the whole static cache. The cache's own length is a tensor on the device (transformers
keeps it there for torch.compile), so nothing that the host knows is frozen in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from moegraft.adapters import AdapterStore
from moegraft.graphs import GraphRunner, StepRunner
from moegraft.hosts.transformers import attention
from moegraft.hosts.transformers.state import StepState
from moegraft.static_batch import StaticInput
from moegraft.types import TokenSlots

#: What a decode forward gets anew at every step; the rest of its arguments never changes.
STEP_INPUTS = ("input_ids", "position_ids", "attention_mask")


class StaticDecode:
    """One static cache and the graphs of the model's decode forward over it.

    Args:
        model: the attached model.
        state: its slots.
        store: its adapters.
        batch_size: rows, all of them in every step.
        max_length: tokens that the cache holds per row.
        runner: ``GraphRunner``, or ``StepRunner`` to run the same steps without graphs.
    """

    def __init__(
        self,
        model: Any,
        state: StepState,
        store: AdapterStore,
        batch_size: int,
        max_length: int,
        runner: type[StepRunner] = GraphRunner,
    ) -> None:
        from transformers import StaticCache

        self.model = model
        self.batch_size = batch_size
        self.max_length = max_length
        self._config = model.config.get_text_config(decoder=True)
        self.cache = StaticCache(config=self._config, max_cache_len=max_length)
        self._state = state
        self._store = store
        self._runner_class = runner
        self.runner: StepRunner | None = None
        self._weights = weights_of(model)
        self._sites = store.sites_version
        self._may_group = attention.may_group(model)

    @property
    def started(self) -> bool:
        """True once the cache has its memory, which the first prompt gives it."""
        return all(layer.is_initialized for layer in self.cache.layers)

    def reset(self) -> None:
        """Empty the cache for another batch and forget graphs that no longer fit the model.

        Graphs go when the model's weights are elsewhere, those with adapters also when adapters
        came to sites that had none when they were captured.
        """
        if self.runner is not None:
            self.runner.follow()
        self.cache.reset()
        weights, sites = weights_of(self.model), self._store.sites_version
        if self.runner is not None:
            if weights != self._weights:
                self.runner.drop()
            elif sites != self._sites:
                self.runner.drop(lora_only=True)
        self._weights, self._sites = weights, sites

    @property
    def lengths(self) -> list[torch.Tensor]:
        """The cache's lengths, one scalar tensor per layer; changed in place by each forward."""
        return [layer.cumulative_length for layer in self.cache.layers]

    def make_runner(
        self,
        step: Callable[[Mapping[str, torch.Tensor], TokenSlots | None], Any],
        inputs: Mapping[str, StaticInput],
        changed: list[torch.Tensor],
    ) -> StepRunner:
        """Make (or replace) the runner of ``step``; the cache must have seen a prompt."""
        device, buckets = self.cache.layers[0].keys.device, [self.batch_size]
        if issubclass(self._runner_class, GraphRunner):
            self.runner = self._runner_class(
                step,
                inputs,
                buckets,
                device=device,
                before_capture=self._store.freeze,
                changed=[*self.lengths, *changed],
            )
        else:
            self.runner = self._runner_class(step, inputs, buckets, device=device)
        return self.runner

    def logits(
        self,
        forward: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor],
        slots: TokenSlots | None,
        fixed: Mapping[str, Any],
    ) -> torch.Tensor:
        """Run one decode forward.

        Args:
            forward: the model's own forward.
            inputs: :data:`STEP_INPUTS`: ids and positions ``[B, 1]``, the mask ``[B, 1, 1, L]``.
            slots: adapter slot per row; None = base only.
            fixed: its other arguments.

        Returns:
            The logits, ``[B, 1, vocabulary]``.
        """
        grouped = attention.grouped_attention(self.model) if self._may_group else nullcontext()
        with self._state.use_step(slots, self.batch_size), grouped:
            output = forward(
                **{name: inputs[name] for name in STEP_INPUTS},
                **{**fixed, "past_key_values": self.cache, "use_cache": True, "return_dict": True},
            )
        logits: torch.Tensor = output.logits
        return logits

    def copy_of_cache(self, static: bool) -> Any:
        """Return a cache of its own with what the rows hold; its length is read from the device."""
        from transformers import DynamicCache, StaticCache

        if static:
            copy = StaticCache(config=self._config, max_cache_len=self.max_length)
        else:
            copy = DynamicCache(config=self._config)
        length = int(self.cache.layers[0].cumulative_length)
        for i, layer in enumerate(self.cache.layers):
            keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
            copy.update(keys.clone(), values.clone(), i)
        return copy


def weights_of(model: torch.nn.Module) -> tuple[tuple[int, torch.dtype], ...]:
    """Return where a model's weights are; graphs hold these addresses."""
    return tuple((parameter.data_ptr(), parameter.dtype) for parameter in model.parameters())
