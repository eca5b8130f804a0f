"""Which activation a caller means: by our own class, by name, or by the number other ops use."""

from __future__ import annotations

from operator import index
from typing import TypeAlias

from moegraft.activations import check_activation
from moegraft.errors import UnsupportedError
from moegraft.types import Activation

#: None = SwiGLU; a name of :data:`NAMES`; a number of :data:`NUMBERS`; or an :class:`Activation`.
ActivationLike: TypeAlias = Activation | str | int | None

#: Name -> (activation, has a gate).
NAMES: dict[str, tuple[Activation, bool]] = {
    "swiglu": (Activation("silu"), True),
    "geglu": (Activation("gelu"), True),
    "geglu_tanh": (Activation("gelu_tanh"), True),
    "reglu": (Activation("relu"), True),
    "swiglu_oai": (Activation("silu", limit=7.0, alpha=1.702, up_shift=1.0), True),
    "silu": (Activation("silu"), False),
    "gelu": (Activation("gelu"), False),
    "gelu_tanh": (Activation("gelu_tanh"), False),
    "relu": (Activation("relu"), False),
    "relu2": (Activation("relu2"), False),
}
#: The numbers of TensorRT-LLM's and FlashInfer's ``ActivationType`` that mean one thing.
NUMBERS = {1: "relu", 2: "silu", 3: "swiglu", 6: "relu2"}
_AMBIGUOUS = {
    0: "Gelu: pass 'gelu' or 'gelu_tanh'",
    4: "Geglu: pass 'geglu' or 'geglu_tanh'",
    5: "SwigluBias: pass 'swiglu_oai', or an Activation with its limit, alpha and up_shift",
    7: "Identity: it has no implementation",
}


def read_activation(wanted: ActivationLike) -> tuple[Activation, bool | None]:
    """Return the activation and whether it has a gate; None = the weights' shape says so.

    Raises:
        UnsupportedError: unknown, ambiguous, or ``custom``; says what to pass instead.
    """
    if isinstance(wanted, Activation):
        check_activation(wanted)
        if wanted.kind == "custom":
            raise UnsupportedError(
                "activation_type is a custom function, which an operator can't take; use "
                "moegraft.layer.MoeLoraLayer."
            )
        return wanted, None
    if wanted is None:
        return NAMES["swiglu"]
    if not isinstance(wanted, str):
        try:
            number = -1 if isinstance(wanted, bool) else index(wanted)
        except TypeError:
            number = -1
        if number < 0:
            raise UnsupportedError(
                f"activation_type={wanted!r} is no name, number or Activation; known names: "
                f"{', '.join(NAMES)}."
            )
        if number in _AMBIGUOUS:
            raise UnsupportedError(f"activation_type={number} is {_AMBIGUOUS[number]}.")
        if number not in NUMBERS:
            raise UnsupportedError(
                f"activation_type={number} is unknown; known numbers: "
                f"{', '.join(f'{n} ({name})' for n, name in NUMBERS.items())}."
            )
        wanted = NUMBERS[number]
    if wanted not in NAMES:
        raise UnsupportedError(
            f"activation_type={wanted!r} is unknown; known: {', '.join(NAMES)}, or an Activation."
        )
    return NAMES[wanted]
