"""What a plan is made from: the facts about one call that are known on the host."""

from __future__ import annotations

from dataclasses import dataclass

from moegraft.types import ExpertWeights


@dataclass(frozen=True)
class Problem:
    """One layer call, described without any tensor.

    Attributes:
        num_tokens, top_k: T and K.
        num_experts, hidden, intermediate: E (local), H and I.
        gated: False for experts without a gate.
        dtype: name of the weights' dtype, such as ``"bfloat16"``; of quantised ones, of the
            activations.
        weight_format: ``"unquantized"``, or one of :data:`moegraft.quant.FORMATS`.
        device_type: ``"cpu"`` or ``"cuda"``.
        max_rank: the bank's maximum rank; 0 = the layer has no adapters at all.
        activation: kind of activation; ``"custom"`` is a function of the host's.
        post_norm: a norm behind each expert.

    A plan depends on nothing else: never on which adapters are live.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    dtype: str
    weight_format: str
    device_type: str
    max_rank: int = 0
    activation: str = "silu"
    post_norm: bool = False

    @property
    def num_pairs(self) -> int:
        """P = T*K."""
        return self.num_tokens * self.top_k

    @staticmethod
    def of(weights: ExpertWeights, num_tokens: int, top_k: int, max_rank: int = 0) -> Problem:
        """Describe a call of a layer with these weights."""
        return Problem(
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=weights.num_experts,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            gated=weights.layout.gated,
            dtype=str(weights.dtype).removeprefix("torch."),
            weight_format=weights.weight_format,
            device_type=weights.device.type,
            max_rank=max_rank,
            activation=weights.activation.kind,
            post_norm=weights.post_norm is not None,
        )

    @staticmethod
    def of_linear(
        dtype: str, device_type: str, num_tokens: int, in_features: int, out_features: int
    ) -> Problem:
        """Describe a dense linear: a MoE with one expert and one choice."""
        return Problem(
            num_tokens, 1, 1, in_features, out_features, False, dtype, "unquantized", device_type
        )
