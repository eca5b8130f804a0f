"""Experts classes outside of transformers' experts interface that are served all the same.

The interface gives a function instead of an experts module's forward. These classes don't ask for
one, so the forward of each instance is shadowed while attached. A new one is an entry of
:data:`OUTSIDE`: how its weights lie, and what its forward's arguments mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from moegraft.errors import MoegraftError
from moegraft.types import WeightLayout


class RunsExperts(Protocol):
    """What runs an experts module: its layer, with this step's slots."""

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        repeats: int = 1,
    ) -> torch.Tensor:
        """``[N, H], [N, K], [N, K] -> [N, H]``; the batch's tokens come ``repeats`` times."""
        ...


@dataclass(frozen=True)
class OutsideClass:
    """How one class is served.

    Attributes:
        layout: of ``gate_up_proj`` and ``down_proj``.
        run: (module, what runs it, the forward's arguments) -> the forward's result.
        how: for people.
    """

    layout: WeightLayout
    run: Callable[..., torch.Tensor]
    how: str


def _as_inside(
    module: Any,
    experts: RunsExperts,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    return experts(hidden, ids, weights)


def _llama4(module: Any, experts: RunsExperts, hidden: torch.Tensor) -> torch.Tensor:
    """Rows are ``[E * T]``, all tokens for expert 0 first, scaled by the router.

    The router's scale is 0 where it did not choose an expert. Such a row is 0 and gives 0, so it is
    left out.
    """
    num_tokens = hidden.shape[0] // module.num_experts
    expert = torch.arange(module.num_experts, device=hidden.device).repeat_interleave(num_tokens)
    ids = expert.where(hidden.ne(0).any(1), -1)[:, None]
    weights = hidden.new_ones(hidden.shape[0], 1)
    return experts(hidden, ids, weights, repeats=module.num_experts)


#: Name of the class -> how it is served.
OUTSIDE: Mapping[str, OutsideClass] = {
    "Llama4TextExperts": OutsideClass(
        WeightLayout("gate_first", out_major=False),
        _llama4,
        "its rows are every token for every expert, already scaled by the router",
    ),
    "Step3p7Experts": OutsideClass(
        WeightLayout(), _as_inside, "it is called as the classes of the interface are"
    ),
}


def outside_of(module: nn.Module) -> OutsideClass | None:
    """Return how a module of a class outside of the interface is served; None for all others."""
    return OUTSIDE.get(type(module).__name__)


class ShadowedForward:
    """An instance's forward, replaced until :meth:`remove`."""

    def __init__(self, module: nn.Module, experts: RunsExperts) -> None:
        found = outside_of(module)
        assert found is not None
        self._module, self._experts, self._run = module, experts, found.run
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._run(self._module, self._experts, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MoegraftError(
            "A part of an attached model can't be copied or pickled: detach() first."
        )

    def is_in_place(self) -> bool:
        """False when something else has replaced the forward since."""
        return self._module.__dict__.get("forward") is self

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._module.__dict__.pop("forward", None)
