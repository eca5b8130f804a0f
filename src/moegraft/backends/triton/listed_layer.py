"""A layer's fused run, its launches written down; see :mod:`moegraft.backends.launch_list`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache, partial

import torch

from moegraft.backends.launch_list import LaunchLists
from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.prefill.config import PrefillConfig
from moegraft.backends.triton.prefill.layer import run_prefill
from moegraft.backends.triton.prefill.token_order import token_order
from moegraft.call import LayerCall, LayerRun
from moegraft.problem import Problem
from moegraft.types import ExpertWeights


class ListedLayer:
    """A run of a whole layer, by list where the same kind of call was made before.

    Args:
        run: the plain way.
        tiles: of the prefill kernels, which read the tokens in the order of their slots: a step's
            first layer makes it for all of them. None = the decode kernels run.

    Attributes:
        plain: the plain way.
        lists: what it made so far.
    """

    def __init__(self, run: LayerRun, tiles: PrefillConfig | None = None) -> None:
        self.lists = LaunchLists()
        self.plain, self._tiles = run, tiles

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """Run a layer; see :data:`moegraft.call.LayerRun`."""
        x = call.x_TH
        if not x.shape[0] or x.stride(1) != 1:
            return self.plain(call)
        out = call.out
        if out is None:
            out = torch.empty_like(x)
            call = replace(call, out=out)
        ids, topk_weights, table = call.topk_ids, call.topk_weights, call.table
        tensors, weights_kind = _described(call.weights)
        inputs = [x, out, ids, topk_weights, *tensors]
        lora = call.lora
        if lora and table is not None and call.slots is not None:
            inputs += [call.slots.slots, table.arena.data, table.records]
            if table.expert_map is not None:
                inputs.append(table.expert_map)
            if self._tiles is not None and table.max_rank:
                options = self._tiles.launch_options()
                inputs.append(token_order(call.slots, table.num_slots, options))
        kind: Hashable = (
            tuple([(t.stride(), t.dtype) for t in tensors]),  # a parameter may get other memory
            x.shape, x.stride(), x.dtype, out.stride(), out.dtype, ids.shape, ids.stride(),
            ids.dtype, topk_weights.stride(), topk_weights.dtype, weights_kind, lora,
            None if table is None else (table.kind, table.arena.data.dtype), call.expert_offset,
            call.scale,
        )  # fmt: skip
        self.lists.run(kind, inputs, partial(self.plain, call))
        return out


def _described(weights: ExpertWeights) -> tuple[tuple[torch.Tensor, ...], Hashable]:
    """Return all tensors of weights, and what else is equal for weights of the same kind."""
    found: tuple[tuple[torch.Tensor, ...], Hashable] | None = weights.cache.get("described")
    if found is None:
        biases, scales = (weights.gate_up_bias, weights.down_bias), weights.scales
        own = () if scales is None else scales.tensors
        given = (weights.gate_up, weights.down, *biases, *own)
        sizes = tuple(None if t is None else t.shape for t in given)
        act, layout = weights.activation, weights.layout
        kind = (sizes, act, layout, weights.weight_format, weights.dtype)
        tensors = tuple(tensor for tensor in given if tensor is not None)
        found = weights.cache["described"] = (tensors, kind)
    return found


@lru_cache(maxsize=256)
def listed_layer(problem: Problem, config: FusedConfig, tiles: PrefillConfig | None) -> ListedLayer:
    """Return the run of all layers of a problem: what one of them made serves the others.

    Args:
        problem: what they run.
        config: tiles of the decode kernels.
        tiles: of the prefill kernels; None = the decode kernels run it.
    """
    if tiles is None:
        return ListedLayer(partial(run_layer, config=config))
    return ListedLayer(partial(run_prefill, config=tiles, other=config), tiles)
