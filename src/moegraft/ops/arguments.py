"""Checks of arguments that every routed op shares, whatever the format of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moegraft.errors import MoegraftError, UnsupportedError
from moegraft.ops.pack import unpack_topk

#: ``routing_method_type`` values under which given ids and weights mean ``sum_k w * row``. The op
#: never routes, so they all do the same.
ROUTING_METHODS = {
    0: "Default",
    1: "Renormalize",
    2: "DeepSeekV3",
    4: "RenormalizeNaive",
    5: "TopK",
}
_OTHER_METHODS = {3: "Llama4: it puts the routing weight on the input of the experts"}


@dataclass(frozen=True)
class LocalExperts:
    """Which of the model's experts are here.

    Attributes:
        num_experts: in the model.
        first: global id of local expert 0.
        count: how many are here.

    Example: rank 1 of 4 over 128 experts is ``LocalExperts(128, 32, 32)``.
    """

    num_experts: int
    first: int
    count: int


def check_routing_method(routing_bias: object, routing_method_type: int | None) -> None:
    """Raise :class:`UnsupportedError` where the caller expects this op to route."""
    if routing_bias is not None:
        raise UnsupportedError(
            "routing_bias is not implemented: the op takes experts that were chosen already. Add "
            "the bias before top-k, and pass None here."
        )
    if routing_method_type is None or int(routing_method_type) in ROUTING_METHODS:
        return
    number = int(routing_method_type)
    known = ", ".join(f"{n} ({name})" for n, name in ROUTING_METHODS.items())
    what = _OTHER_METHODS.get(number, "its meaning is not known here")
    raise UnsupportedError(
        f"routing_method_type={number} is not implemented ({what}); implemented: {known}, all of "
        "which use the ids and weights as given."
    )


def local_experts(
    found: int, num_experts: int | None, offset: int, local_num_experts: int | None
) -> LocalExperts:
    """Return the range of local experts; ``found`` is the weights' first dimension."""
    count = found if local_num_experts is None else local_num_experts
    if count != found:
        raise MoegraftError(f"local_num_experts is {count}, but the weights hold {found} experts.")
    total = offset + count if num_experts is None else num_experts
    if offset < 0 or offset + count > total:
        raise MoegraftError(
            f"Local experts {offset} to {offset + count - 1} are not among num_experts={total}."
        )
    return LocalExperts(total, offset, count)


def read_routing(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: int,
    top_k: int | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return plain ids and weights ``[T, K]``, contiguous; packed ids when there are no weights."""
    if topk_ids.dim() != 2 or topk_ids.shape[0] != num_tokens:
        raise MoegraftError(
            f"topk_ids have shape {tuple(topk_ids.shape)}; expected [T, K] with T = {num_tokens}, "
            "the rows of hidden_states."
        )
    if top_k is not None and topk_ids.shape[1] != top_k:
        raise MoegraftError(f"top_k is {top_k}, but topk_ids have {topk_ids.shape[1]} columns.")
    if not topk_ids.shape[1]:
        raise MoegraftError(f"topk_ids have shape {tuple(topk_ids.shape)}: no expert per token.")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor is not None and tensor.device != device:
            raise MoegraftError(f"{name} is on {tensor.device}, hidden_states on {device}.")
    if topk_weights is None:
        return unpack_topk(topk_ids)
    if topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point():
        raise MoegraftError(
            f"topk_weights are {topk_weights.dtype} {tuple(topk_weights.shape)}; expected float "
            f"{tuple(topk_ids.shape)}, as topk_ids."
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise MoegraftError(f"topk_ids are {topk_ids.dtype}; expected int32 or int64.")
    return topk_ids.contiguous(), topk_weights.contiguous()


def check_plain_weights(gemm1: torch.Tensor, gemm2: torch.Tensor) -> None:
    """Raise :class:`UnsupportedError` for weights that are not plain ``[E, out, in]`` floats."""
    for name, weight in (("gemm1_weights", gemm1), ("gemm2_weights", gemm2)):
        if weight.dim() == 4:
            raise UnsupportedError(
                f"{name} {tuple(weight.shape)} look shuffled block-major; pass the plain weights "
                "[E, out, in], before any shuffle."
            )
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UnsupportedError(
                f"{name} are {weight.dtype}: quantised, or shuffled bytes. Implemented: bfloat16, "
                "float16, float32, as [E, out, in]."
            )


def check_shuffle_flags(use_shuffled_weight: bool, weight_layout: int) -> None:
    """Raise :class:`UnsupportedError` when the caller says that the weights are shuffled."""
    if use_shuffled_weight:
        raise UnsupportedError(
            "use_shuffled_weight=True is not implemented: pass the plain weights [E, out, in], "
            "before any shuffle."
        )
    if int(weight_layout) != 0:
        raise UnsupportedError(
            f"weight_layout={int(weight_layout)} is not implemented; implemented: 0, the plain "
            "weights [E, out, in] (MajorK)."
        )


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
    contiguous: bool = False,
) -> None:
    """Raise :class:`MoegraftError` unless a tensor is what a kernel reads; None = any float."""
    if tuple(tensor.shape) != shape:
        raise MoegraftError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}.")
    if tensor.device != device:
        raise MoegraftError(f"{name} is on {tensor.device}, the other tensors on {device}.")
    right = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if not right:
        raise MoegraftError(f"{name} is {tensor.dtype}; expected {dtype or 'a float dtype'}.")
    if contiguous and not tensor.is_contiguous():
        raise MoegraftError(
            f"{name} has strides {tensor.stride()} for {shape}; it must be contiguous."
        )
    if tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise MoegraftError(f"The columns of {name} are {tensor.stride(-1)} elements apart, not 1.")


def check_written(tensor: torch.Tensor, name: str, read: Mapping[str, torch.Tensor | None]) -> None:
    """Raise :class:`MoegraftError` when a tensor to write to shares memory with itself or others.

    Kernels write rows while other rows are still read. In ``torch.compile``, where tensors have no
    addresses, nothing is checked.
    """
    if tensor.dim() == 2 and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise MoegraftError(
            f"The rows of {name} are {tensor.stride(0)} elements apart, less than their "
            f"{tensor.shape[1]} columns; it is written to, so they may not overlap."
        )
    if torch.compiler.is_compiling():
        return
    start, end = _bytes(tensor)
    for other_name, other in read.items():
        if other is None:
            continue
        other_start, other_end = _bytes(other)
        # Most lie apart, which is soon seen.
        if start < other_end and other_start < end and _overlap(tensor, other):
            raise MoegraftError(
                f"{name} shares memory with {other_name}, which is read while it is written; give "
                "it memory of its own."
            )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True unless two tensors whose bytes overlap are known to share no element."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    a_start, b_start = a.data_ptr(), b.data_ptr()
    if a.dim() != 2 or b.dim() != 2:
        return True
    # Two windows of columns of one matrix.
    pitch = a.stride(0) * a.element_size()
    if pitch <= 0 or pitch != b.stride(0) * b.element_size():
        return True
    a_width, b_width = (t.shape[1] * t.element_size() for t in (a, b))
    between = (b_start - a_start) % pitch
    return between < a_width or between + b_width > pitch


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte and the one behind the last; anything for no elements."""
    if tensor.is_contiguous():
        start = tensor.data_ptr()
        return start, start + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
