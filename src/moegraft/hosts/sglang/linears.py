"""SGLang's LoRA wrappers of linears, with moegraft behind them.

SGLang's LoRA backend gets the base product as a function, and adds each slice's delta to its
columns: q, k and v of one product, gate and up of a dense MLP, or one slice. Here one launch adds
all of them. The base may be quantised: only its result is met. Where the ranks' results are summed
afterwards, the delta of this rank's inputs is added before.

The pool owns A ``[S, slices * R, in]``, an adapter of rank r with its slices' A in rows 0 to r, r
to 2r and so on, and B ``[S, out, R]``; the scale is not in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.lora import layers as stock
from sglang.srt.lora.utils import get_target_module_name
from sglang.srt.runtime_context import get_parallel

from moegraft.adapters.foreign_linear import LinearPool
from moegraft.env import sglang_linears
from moegraft.errors import MoegraftError
from moegraft.factors import UNIT_BYTES
from moegraft.hosts.sglang.counters import count
from moegraft.hosts.sglang.eligible import say_why_not
from moegraft.hosts.sglang.steps import batch_slots
from moegraft.hosts.slot_tensors import rank_major, whole_units
from moegraft.linear import LinearLora, LinearLoraGroup

_WRAPPERS = (
    stock.ColumnParallelLinearWithLoRA,
    stock.MergedColumnParallelLinearWithLoRA,
    stock.QKVParallelLinearWithLoRA,
    stock.RowParallelLinearWithLoRA,
    stock.ReplicatedLinearWithLoRA,
)
#: SGLang multiplies by these factors in other places too.
_READ_ELSEWHERE = "kv_b_proj"


class Linear:
    """What a wrapper needs to run on moegraft.

    Attributes:
        pool: the tables over SGLang's slot tensors.
        key: the name of its slot tensors in SGLang's pool.
        layer: the number of its layer.
    """

    def __init__(self, pool: LinearPool, key: str, layer: int, widths: list[int]) -> None:
        self.pool, self.key, self.layer, self._widths = pool, key, layer, widths
        whole = pool.pool
        self._group = LinearLoraGroup(
            [LinearLora(table, whole.dtype, whole.device) for table in pool.tables]
        )

    def load(self, slot: int, adapter: Any, targets: Any) -> None:
        """Say that a slot holds an adapter now."""
        rank = (
            adapter.config.r if _has(adapter.layers[self.layer].weights, self.key, targets) else 0
        )
        self.pool.load(slot, [rank] * len(self._widths), adapter.scaling)

    def add(self, backend: Any, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the deltas of the batch's adapters to the first columns of ``y`` ``[T, out]``."""
        slots = batch_slots(backend, backend.get_batch_info(), x.shape[0])
        if slots is not None and self.pool.pool.table.has_delta(slots):
            self._group.add_to(y[:, : sum(self._widths)].split(self._widths, dim=1), x, slots)
            count("linear_calls")


def _has(names: Any, key: str, targets: Any) -> bool:
    own = [name for name in names if ".experts." not in name]
    return any(key in name and get_target_module_name(name, targets) == key for name in own)


def take_over(pool: Any, base_model: Any) -> None:
    """Make tables over the slot tensors of a model's linears, B stored rank-major.

    Args:
        pool: SGLang's memory pool, with its buffers.
        base_model: the model, its layers wrapped.
    """
    if not sglang_linears():
        return
    for name, wrapper in base_model.named_modules():
        if type(wrapper) not in _WRAPPERS:
            continue
        layer = get_layer_id(name)
        key = get_target_module_name(name, pool.target_modules)
        if layer is None or key not in pool.A_buffer:
            continue
        a, b = pool.A_buffer[key][layer], pool.B_buffer[key][layer]
        made = _linear(wrapper, name, key, layer, a, b)
        if isinstance(made, str):
            say_why_not(name, made, "linears")
            count("linear_layers_left")
            continue
        linear, stored = made
        wrapper._moegraft_linear, pool.B_buffer[key][layer] = linear, stored
        count("linear_layers")


def _linear(
    wrapper: Any, name: str, key: str, layer: int, a: torch.Tensor, b: torch.Tensor
) -> tuple[Linear, torch.Tensor] | str:
    """Return what runs a linear and its new B ``[S, out, R]``, or why it is left to SGLang."""
    reason = _reason_against(wrapper, name, a)
    if reason is not None:
        return reason
    slices, rank = a.shape[1] // b.shape[2], b.shape[2]
    partition = getattr(wrapper.base_layer, "output_partition_sizes", None)
    widths = [b.shape[1]] if slices == 1 else list(partition or ())[:slices]
    if len(widths) != slices or sum(widths) != b.shape[1] or a.shape[1] != slices * rank:
        return f"its slot tensors are A {tuple(a.shape)} and B {tuple(b.shape)}"
    stored = rank_major(b[:, None])
    four = [a[:, None]] * slices
    try:
        tables = LinearPool(name, four, stored.split(widths, dim=2), packed=True)
        linear = Linear(tables, key, layer, widths)
    except MoegraftError as error:
        return str(error)
    if tables.pool.device.type != "cpu":
        tables.pool.expect_adapters()  # graphs are captured before adapters come
    return linear, stored[:, 0]


def _reason_against(wrapper: Any, name: str, a: torch.Tensor) -> str | None:
    if name.endswith(_READ_ELSEWHERE):
        return "SGLang reads its factors in other places too"
    if wrapper.lora_backend.supports_lora_a_overlap or envs.SGLANG_EXPERIMENTAL_LORA_OPTI.get():
        return "SGLang runs its factors on a stream of their own"
    if get_parallel().attn_dp_size > 1:
        return "attention is data parallel"
    if not whole_units((a.shape[2],), a.dtype):
        return f"rows of {a.shape[2]} values are no multiples of {UNIT_BYTES} bytes"
    return None


def linears(base_model: Any) -> list[Linear]:
    """Return those of a model's linears that run on moegraft."""
    found = (getattr(m, "_moegraft_linear", None) for m in base_model.modules())
    return [linear for linear in found if linear is not None]


def forward_with_base(
    original: Callable[..., torch.Tensor],
    self: Any,
    layer: Any,
    x: torch.Tensor,
    base_fn: Callable[[], torch.Tensor],
    *args: Any,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a linear's base product and its adapters."""
    linear = getattr(layer, "_moegraft_linear", None)
    if linear is None:
        return original(self, layer, x, base_fn, *args, all_reduce=all_reduce, **kwargs)
    output = base_fn()
    linear.add(self, output, x)
    return output if all_reduce is None else all_reduce(output)
