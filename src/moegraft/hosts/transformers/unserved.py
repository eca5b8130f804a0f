"""Modules that look like places for adapters and are none, with the reason for messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from moegraft.hosts.transformers.outside import outside_of

#: Ends of the names of classes that run several experts.
_EXPERTS_ENDINGS = ("Experts", "ExpertGLU", "ExpertsGemm", "CDMoE", "NaiveMoe")
#: What is special about known ones; all others just don't dispatch.
_KNOWN: Mapping[str, str] = {
    "DbrxExperts": "it keeps each projection of all experts in one matrix",
    "DbrxExpertGLU": "it keeps each projection of all experts in one matrix",
    "JetMoeParallelExperts": "its attention chooses experts too",
    "LongcatFlashExperts": "some of its experts pass their input on",
    "Mxfp4GptOssExperts": "load the model with Mxfp4Config(dequantize=True)",
}
#: Linears whose own forward is that of a plain one.
_PLAIN_ANYWAY = frozenset(("FalconLinear",))


def is_experts_module(module: nn.Module) -> bool:
    """True for modules whose experts are served: those of the interface, and some others."""
    return outside_of(module) is not None or all(
        hasattr(module, a) for a in ("has_gate", "is_transposed", "_apply_gate", "down_proj")
    )


def has_own_forward(linear: nn.Linear) -> bool:
    """True for a linear of a model's own class that computes more, or other, than ``W x + b``."""
    kind = type(linear)
    own = kind.__module__.startswith("transformers.models.")
    return own and kind.forward is not nn.Linear.forward and kind.__name__ not in _PLAIN_ANYWAY


def why_no_experts(module: nn.Module) -> str | None:
    """Say why a module that runs experts can't take adapters; None for all other modules."""
    name = type(module).__name__
    if is_experts_module(module) or not name.endswith(_EXPERTS_ENDINGS):
        return None
    detail = f" ({_KNOWN[name]})" if name in _KNOWN else ""
    return (
        f"it is part of a {name}, which does not use transformers' experts interface{detail}; LoRA "
        "on its experts is not served"
    )


def why_no_linear(parent: nn.Module, name: str, linear: nn.Linear) -> str | None:
    """Say why a linear can't take adapters; None when it can.

    Args:
        parent: the module that owns it.
        name: its name there.
        linear: the linear; no router.
    """
    if has_own_forward(linear):
        return f"it is a {type(linear).__name__}, which is no plain linear; LoRA on it isn't served"
    kind: Any = type(parent)
    if name in _multiplied_by_hand(kind):
        return (
            f"a {type(parent).__name__} multiplies by its weight without calling it, so LoRA on it "
            "would have no effect"
        )
    return None


@cache
def _multiplied_by_hand(kind: Any) -> frozenset[str]:
    """Names of the children whose weights a class multiplies by in its own code."""
    if not kind.__module__.startswith("transformers.models."):
        return frozenset()
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return frozenset()
    weight = r"self\.(\w+)\.weight"
    patterns = (rf"{weight}\s*@", rf"@\s*{weight}", rf"linear\([^()]*,\s*{weight}")
    return frozenset(name for pattern in patterns for name in re.findall(pattern, source))
