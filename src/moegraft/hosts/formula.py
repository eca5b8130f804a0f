"""How an engine's experts compute, in moegraft's terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.types import Activation, ExpertWeights, WeightLayout


@dataclass(frozen=True)
class Formula:
    """An activation and the order of gate and up that it reads.

    Example: SwiGLU over ``[gate | up]`` is ``Formula(Activation("silu"), WeightLayout())``.
    """

    activation: Activation
    layout: WeightLayout


class WeightsInPlace:
    """An engine's weights as :class:`ExpertWeights`, made anew when they have moved.

    Example: ``WeightsInPlace(formula).of(w1, w2, None, None)``, once per call.
    """

    def __init__(self, formula: Formula) -> None:
        self._formula = formula
        self._known: ExpertWeights | None = None

    def of(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        bias1: torch.Tensor | None,
        bias2: torch.Tensor | None,
    ) -> ExpertWeights:
        """Wrap the weights where they are; a reload may have put them elsewhere.

        Args:
            w1: ``[E, 2I or I, H]``.
            w2: ``[E, H, I]``.
            bias1: ``[E, 2I or I]`` or None.
            bias2: ``[E, H]`` or None.
        """
        known = self._known
        if (
            known is None
            or known.gate_up.data_ptr() != w1.data_ptr()
            or known.down.data_ptr() != w2.data_ptr()
            or known.gate_up_bias is not bias1
            or known.down_bias is not bias2
        ):
            known = self._known = ExpertWeights(
                w1.detach(),
                w2.detach(),
                bias1,
                bias2,
                self._formula.activation,
                self._formula.layout,
            )
        return known
