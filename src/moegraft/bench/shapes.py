"""The sizes of models that people serve; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from moegraft.errors import MoegraftError


@dataclass(frozen=True)
class ModelShape:
    """One MoE layer of a model, bf16.

    Attributes:
        name: short name, for options and records.
        title: what people call the model.
        num_experts, hidden, intermediate, top_k: E, H, I and K.
        kind: ``swiglu``; ``gpt_oss``: clamped SwiGLU, interleaved columns, biases; ``relu2``: no
            gate.

    Example: ``MODELS["q30"]`` is E=128, H=2048, I=768, K=8: 9.4 MB per expert, 1.2 GB per layer.
    """

    name: str
    title: str
    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    kind: str = "swiglu"

    @property
    def sides(self) -> int:
        """Projections before the activation: gate and up, or up alone."""
        return 1 if self.kind == "relu2" else 2

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in bf16, without biases."""
        return (self.sides + 1) * self.hidden * self.intermediate * 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of a layer's experts in bf16, without biases."""
        return self.num_experts * self.expert_bytes

    def adapter_bytes(self, rank: int) -> int:
        """Bytes of one adapter with factors of its own for every expert and projection."""
        widths = (self.sides + 1) * (self.hidden + self.intermediate)
        return self.num_experts * rank * widths * 2


_SHAPES = (
    ModelShape("q30", "Qwen3-30B-A3B", 128, 2048, 768, 8),
    ModelShape("q35", "Qwen3.5-35B-A3B", 256, 2048, 512, 8),
    ModelShape("mixtral", "Mixtral-8x7B", 8, 4096, 14336, 2),
    ModelShape("gpt_oss_20b", "gpt-oss-20b", 32, 2880, 2880, 4, "gpt_oss"),
    ModelShape("deepseek_v3", "DeepSeek-V3", 256, 7168, 2048, 8),
    ModelShape("qwen35_397b", "Qwen3.5-397B", 512, 4096, 1024, 10),
    ModelShape("kimi_k25", "Kimi-K2.5", 384, 7168, 2048, 8),
    ModelShape("glm_52", "GLM-5.2", 256, 6144, 2048, 8),
    ModelShape("nemotron3_super", "Nemotron 3 Super", 512, 1024, 2688, 22, "relu2"),
)
#: Name -> shape.
MODELS = {shape.name: shape for shape in _SHAPES}


def is_number(text: str) -> bool:
    """True for a whole number above 0 of at most nine digits."""
    return text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0


def model_shape(text: str) -> ModelShape:
    """Return the shape called ``text``, or of ``E,H,I,K``; MoegraftError for anything else."""
    if text in MODELS:
        return MODELS[text]
    numbers = text.split(",")
    if len(numbers) == 4 and all(is_number(n.strip()) for n in numbers):
        experts, hidden, intermediate, top_k = (int(n) for n in numbers)
        if top_k > experts:
            raise MoegraftError(f"Shape {text}: K={top_k} is more than E={experts} experts.")
        if hidden % 8 or intermediate % 8:
            raise MoegraftError(
                f"Shape {text}: H={hidden} and I={intermediate} must be multiples of 8, so that "
                "every row of bf16 weights starts at a multiple of 16 bytes."
            )
        name = "x".join(str(n) for n in (experts, hidden, intermediate, top_k))
        return ModelShape(name, f"E,H,I,K = {text}", experts, hidden, intermediate, top_k)
    raise MoegraftError(
        f"There is no model shape {text!r}; choose one of {', '.join(MODELS)}, or give four "
        "numbers E,H,I,K."
    )
