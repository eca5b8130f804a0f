"""vLLM's LoRA wrappers of linears, with moegraft behind them.

vLLM computes the base product and then adds each slice's delta to its columns: q, k and v of one
product, gate and up of a dense MLP, or one slice. Here one launch adds all of them. The base may be
quantised: only its result is met.

The product is part of a compiled model, so the deltas are an operator. Its arguments are tensors
alone, for then the graphs of all layers are equal and compiled once; which layer it is, the address
of its first slot tensor tells.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.library import Library
from vllm.lora import layers as stock
from vllm.utils.torch_utils import direct_register_custom_op

from moegraft.adapters.foreign_linear import LinearPool
from moegraft.hosts.slot_tensors import rank_major
from moegraft.hosts.vllm.counters import count
from moegraft.hosts.vllm.eligible import reason_against_linear, say_why_not
from moegraft.linear import LinearLora, LinearLoraGroup

#: The wrappers that keep whole factors; their relatives for sharded factors stay vLLM's.
_NAMES = (
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "QKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
)
_library = Library("moegraft_vllm", "FRAGMENT")


class _State:
    """What the operator needs of one wrapper."""

    def __init__(self, wrapper: Any, pool: LinearPool) -> None:
        self.wrapper = wrapper
        self.pool = pool
        self.widths = [b.shape[2] for b in wrapper.lora_b_stacked]
        dtype, device = wrapper.lora_config.lora_dtype, pool.pool.device
        self.group = LinearLoraGroup([LinearLora(t, dtype, device) for t in pool.tables])

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the deltas of the step's adapters to ``y``."""
        slots = self.wrapper.punica_wrapper.moegraft_slots(x.shape[0])
        if slots is not None and self.pool.pool.table.has_delta(slots):
            self.group.add_to(y.split_with_sizes(self.widths, dim=1), x, slots)
            count("linear_calls")


#: Address of a wrapper's first slot tensor -> its state.
_states: WeakValueDictionary[int, _State] = WeakValueDictionary()


def _add_lora(y: torch.Tensor, x: torch.Tensor, first_a: torch.Tensor) -> None:
    _states[first_a.data_ptr()].add(y, x)


def _add_lora_fake(y: torch.Tensor, x: torch.Tensor, first_a: torch.Tensor) -> None:
    return None


def register_operator() -> None:
    """Define ``torch.ops.moegraft_vllm.add_lora``; call once."""
    direct_register_custom_op(
        "add_lora", _add_lora, mutates_args=["y"], fake_impl=_add_lora_fake, target_lib=_library
    )


class LinearOnMoegraft:
    """Mixed into vLLM's wrappers."""

    _moegraft: _State | None = None

    def create_lora_weights(
        self: Any, max_loras: int, lora_config: Any, model_config: Any = None
    ) -> None:
        """Make the slot tensors, B rank-major, and the table over them."""
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        reason = reason_against_linear(self, lora_config)
        if reason is not None:
            say_why_not(getattr(self.base_layer, "prefix", "a linear"), reason, "linears")
            count("linear_layers_left")
            return
        self.lora_b_stacked = tuple(map(rank_major, self.lora_b_stacked))
        name = getattr(self.base_layer, "prefix", type(self.base_layer).__name__)
        pool = LinearPool(name, self.lora_a_stacked, self.lora_b_stacked)
        if pool.pool.device.type != "cpu":
            pool.pool.expect_adapters()  # vLLM captures its graphs before adapters come
        self._moegraft = _State(self, pool)
        _states[self.lora_a_stacked[0].data_ptr()] = self._moegraft
        count("linear_layers")

    def reset_lora(self, index: int) -> None:
        """Empty a slot."""
        super().reset_lora(index)  # type: ignore[misc]
        if self._moegraft is not None:
            self._moegraft.pool.clear(index)

    def set_lora(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        """Fill a slot: one factor ``[r, in]``, or a list with one or None per slice."""
        super().set_lora(index, lora_a, lora_b)  # type: ignore[misc]
        if self._moegraft is not None:
            self._moegraft.pool.load(index, self._moegraft_ranks(lora_a, lora_b))

    def _moegraft_ranks(self: Any, lora_a: Any, lora_b: Any) -> list[int]:
        if isinstance(lora_a, torch.Tensor):
            return [int(lora_a.shape[0])] * self.n_slices
        if len(lora_a) != self.n_slices:  # one factor for several slices
            lora_a, _ = self.expand_packed_lora(lora_a, lora_b)
        return [0 if a is None else int(a.shape[0]) for a in lora_a]

    def _apply_lora_to_output(self: Any, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Add the deltas to ``output`` ``[.., out]``, in place."""
        if self._moegraft is None:
            return super()._apply_lora_to_output(x, output)  # type: ignore[misc]
        torch.ops.moegraft_vllm.add_lora(
            output.view(-1, output.shape[-1]),
            x.reshape(-1, x.shape[-1]),
            self.lora_a_stacked[0],
        )
        return output


def our_linears() -> dict[Any, Any]:
    """Return vLLM's class -> ours of the same name, for the wrappers that this version has."""
    found = [getattr(stock, name) for name in _NAMES if hasattr(stock, name)]
    return {
        cls: type(cls.__name__, (LinearOnMoegraft, cls), {"__module__": __name__}) for cls in found
    }
