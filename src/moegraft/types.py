"""The data that crosses module boundaries: frozen dataclasses, nothing else.

Letters used for shapes, here and everywhere:
``T`` tokens, ``K`` experts per token, ``P = T*K`` pairs, ``N`` pairs that are local to this rank,
``E`` local experts, ``H`` hidden size, ``I`` intermediate size, ``R`` LoRA rank, ``S`` slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import torch

from moegraft.derived import Derived
from moegraft.errors import MoegraftError
from moegraft.type_checks import check_choice, check_expert_tensors, slot_numbers
from moegraft.weight_scales import WeightScales

GateUpOrder = Literal["gate_first", "up_first", "interleaved", "no_gate"]
_Derived = TypeVar("_Derived")
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "custom"]


@dataclass(frozen=True)
class Activation:
    """What happens between gate_up and down, in fp32.

    Gated: ``h = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_shift)``.
    Not gated: ``h = f(up)``.
    ``f`` for ``silu`` is ``x * sigmoid(alpha * x)``; ``relu2`` is ``relu(x)**2``.

    Attributes:
        kind: which ``f``; ``custom`` calls ``custom`` on the packed ``[N, 2I]`` fp32 gate_up
            rows in the host's own column order and expects ``[N, I]``.
        limit: clamp of gate (above) and up (both sides); None for no clamp.
        alpha: only for ``silu``; gpt_oss uses 1.702.
        up_shift: added to up after the clamp; gpt_oss uses 1.

    Example: SwiGLU is ``Activation("silu")``; gpt_oss is ``Activation("silu", limit=7.0,
    alpha=1.702, up_shift=1.0)``.
    """

    kind: ActivationKind = "silu"
    limit: float | None = None
    alpha: float = 1.0
    up_shift: float = 0.0
    custom: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if (self.kind == "custom") != (self.custom is not None):
            raise MoegraftError(
                f"Activation kind {self.kind!r} and custom={self.custom!r} contradict each other: "
                "kind 'custom' needs a function, the others must not have one."
            )


@dataclass(frozen=True)
class WeightLayout:
    """How a host stores expert weights; kernels read the tag, nothing is copied.

    Attributes:
        gate_up_order: order of the 2I output columns. ``gate_first``: ``[gate | up]``;
            ``up_first``: ``[up | gate]``; ``interleaved``: ``g0 u0 g1 u1 ..``;
            ``no_gate``: only ``up``, I columns.
        out_major: True for ``[E, out, in]`` storage, False for ``[E, in, out]`` (gpt_oss).

    Example: Qwen3-MoE is ``WeightLayout()``; gpt_oss is ``WeightLayout("interleaved", False)``.
    """

    gate_up_order: GateUpOrder = "gate_first"
    out_major: bool = True

    def __post_init__(self) -> None:
        check_choice("gate_up_order", self.gate_up_order, get_args(GateUpOrder))

    @property
    def gated(self) -> bool:
        """True when there is a gate half."""
        return self.gate_up_order != "no_gate"

    def columns(self, projection: str, intermediate: int) -> slice:
        """Return the columns of ``gate`` or ``up`` among the packed gate_up columns."""
        if self.gate_up_order == "no_gate":
            assert projection == "up", projection
            return slice(0, intermediate)
        first = (projection == "gate") != (self.gate_up_order == "up_first")
        if self.gate_up_order == "interleaved":
            return slice(0 if projection == "gate" else 1, None, 2)
        return slice(0, intermediate) if first else slice(intermediate, 2 * intermediate)


@dataclass(frozen=True)
class ExpertWeights:
    """One MoE layer's base weights, in the host's own storage.

    Attributes:
        gate_up: ``[E, 2I, H]`` (``[E, I, H]`` without a gate; ``[E, H, 2I]`` when not out-major).
        down: ``[E, H, I]`` (``[E, I, H]`` when not out-major).
        gate_up_bias: ``[E, 2I]`` in the same column order as ``gate_up``, or None.
        down_bias: ``[E, H]`` or None.
        weight_format: ``"unquantized"``, or one of :data:`moegraft.quant.FORMATS`. Quantised ones
            are out-major; two 4-bit values lie in one uint8, so that the last size is half.
        scales: of quantised weights; None else.
        post_norm: a norm behind each expert, before the routing weight (muse_spark): a function of
            fp32 rows ``[N, H]``, base and delta together; None for none.

    Strided views are fine. Raises :class:`MoegraftError` when shapes or dtypes disagree.

    Example: E=4 experts, H=8, I=6: ``gate_up`` is ``[4, 12, 8]`` and ``down`` is ``[4, 8, 6]``.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: Activation = field(default_factory=Activation)
    layout: WeightLayout = field(default_factory=WeightLayout)
    weight_format: str = "unquantized"
    scales: WeightScales | None = None
    post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        check_expert_tensors(self)

    @cached_property
    def cache(self) -> Derived:
        """What others derived from these weights' facts, each under its own name."""
        return Derived()

    @property
    def gate_up_oi(self) -> torch.Tensor:
        """``gate_up`` as a ``[E, 2I, H]`` view, whatever the storage order."""
        return self.gate_up if self.layout.out_major else self.gate_up.transpose(1, 2)

    @property
    def down_oi(self) -> torch.Tensor:
        """``down`` as a ``[E, H, I]`` view, whatever the storage order."""
        return self.down if self.layout.out_major else self.down.transpose(1, 2)

    @property
    def num_experts(self) -> int:
        """E, the experts held here."""
        return self.down.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.down_oi.shape[1]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.down_oi.shape[2] * (2 if self.down.dtype == torch.uint8 else 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that activations are multiplied in: the weights' own unless quantised."""
        return self.down.dtype if self.scales is None else self.scales.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.down.device


@dataclass(frozen=True)
class LoraFactor:
    """The low-rank factors of one projection of one adapter: ``dW[e] = scale * B[e] @ A[e]``.

    Attributes:
        lora_A: ``[Ea, R, in]``, Ea = number of expert entries or 1 (shared by all experts).
        lora_B: ``[Eb, out, R]``, Eb likewise. May be a transposed view of rank-major storage.
        scale: alpha/r, or alpha/sqrt(r) for rank-stabilised adapters; stays fp32, never folded in.

    Example: rank 2 on 4 experts with a shared A: ``lora_A [1, 2, 8]``, ``lora_B [4, 12, 2]``.
    """

    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.lora_A.dim() != 3 or self.lora_B.dim() != 3:
            raise MoegraftError(
                f"LoRA factors must be 3-D; got A {tuple(self.lora_A.shape)} and B "
                f"{tuple(self.lora_B.shape)}."
            )
        if self.lora_A.shape[1] != self.lora_B.shape[2]:
            raise MoegraftError(
                f"A {tuple(self.lora_A.shape)} has rank {self.lora_A.shape[1]} but B "
                f"{tuple(self.lora_B.shape)} has rank {self.lora_B.shape[2]}."
            )
        entries = {self.lora_A.shape[0], self.lora_B.shape[0]} - {1}
        if len(entries) > 1:
            raise MoegraftError(f"A and B cover different numbers of experts: {sorted(entries)}.")

    @property
    def rank(self) -> int:
        """R; 0 means the factor does nothing."""
        return self.lora_A.shape[1]

    @property
    def num_entries(self) -> int:
        """How many experts have their own entry in A or B; 1 when both are shared."""
        return max(self.lora_A.shape[0], self.lora_B.shape[0])


@dataclass(frozen=True)
class SiteFactors:
    """One adapter's factors at one site.

    Attributes:
        projections: projection name -> factor; a missing name means no delta there. When gate and
            up share one A, both factors hold the very same ``lora_A`` tensor.
        expert_map: int32 ``[E]``, expert -> entry of the factors' expert dimension, -1 = this
            expert has no delta; None = entry e is expert e (also right for linears).

    Example: an adapter for experts 0 and 2 of 4 has ``expert_map = [0, -1, 1, -1]`` and factors
    with 2 entries.
    """

    projections: Mapping[str, LoraFactor]
    expert_map: torch.Tensor | None = None

    def entry(self, expert: int) -> int:
        """Return the factors' entry for local expert ``expert``; -1 when it has none."""
        return expert if self.expert_map is None else int(self.expert_map[expert])


@dataclass(frozen=True)
class TokenSlots:
    """Which adapter slot each token of a batch uses; made once per step, shared by all layers.

    Attributes:
        slots: int32 ``[T]``, -1 = base only.
        live: the distinct slots >= 0, ascending, known on the host; empty = base-only batch.
        cache: what backends derived from the slots, for later steps; see :meth:`derived`.
        in_graph: True for :meth:`captured` ones: nothing may be decided from ``live``.

    Example: four tokens, the last two on slot 3: ``slots = [-1, -1, 3, 3]``, ``live = (3,)``.
    """

    slots: torch.Tensor
    live: tuple[int, ...]
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    in_graph: bool = False

    @staticmethod
    def captured(slots: torch.Tensor) -> TokenSlots:
        """Make one for the capture of a CUDA graph over ``slots``, a static buffer int32 ``[T]``.

        ``live`` is ``(0,)``: not empty, a slot that every table has. What is derived on the device
        becomes part of the graph.
        """
        return TokenSlots(slots, (0,), in_graph=True)

    @staticmethod
    def of(slots: list[int] | torch.Tensor, device: torch.device | str = "cpu") -> TokenSlots:
        """Make one from a list or int tensor ``[T]`` (reads it on the host); below 0 is -1.

        Raises:
            MoegraftError: not one whole number per token.
        """
        tensor = slot_numbers(slots)
        live = tuple(sorted({int(s) for s in tensor.tolist() if s >= 0}))
        return TokenSlots(tensor.to(device), live)

    def derived(self, key: Hashable, version: int, make: Callable[[], _Derived]) -> _Derived:
        """Return what ``make`` derived from these slots and one version of a factor table; only
        the last version is kept per key, for a batch may outlive many writes of a bank."""
        found = self.cache.get(key)
        if found is None or found[0] != version:
            found = self.cache[key] = (version, make())
        value: _Derived = found[1]
        return value

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.slots.shape[0]

    @cached_property
    def has_adapter(self) -> torch.Tensor:
        """bool ``[T]``, True where a token has an adapter."""
        return self.slots >= 0

    @cached_property
    def has_base_rows(self) -> bool:
        """True when at least one token has no adapter (reads the slots on the host)."""
        return not bool(self.has_adapter.all())

    @cached_property
    def slots_i64(self) -> torch.Tensor:
        """``slots`` as int64, for indexing: nothing below -1."""
        return self.slots.long().clamp(min=-1)
