"""Experts modules of transformers on moegraft's layer, through the experts registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from moegraft.activations import apply_activation
from moegraft.env import logger
from moegraft.errors import MoegraftError, UnsupportedError
from moegraft.hosts.transformers.sharding import local
from moegraft.hosts.transformers.spec import weight_layout
from moegraft.hosts.transformers.state import StepState
from moegraft.layer import MoeLoraLayer
from moegraft.types import Activation, ActivationKind, ExpertWeights, TokenSlots, WeightLayout

#: Name under which the forward is registered and that models carry while attached.
IMPLEMENTATION = "moegraft"
#: Attribute of an experts module that holds its :class:`ExpertsGraft` while attached.
_GRAFT = "_moegraft_experts"

#: Attribute of an experts module whose weights lie outside of it, see :func:`hold_weights`.
_WEIGHTS = "_moegraft_weights"

_SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


class ExpertsGraft:
    """One attached experts module: its layer and where this step's slots are.

    ``sharded``: on a rank of several, which exchange rows when gradients are wanted.
    """

    def __init__(self, layer: MoeLoraLayer, state: StepState, sharded: bool = False) -> None:
        self.layer = layer
        self.state = state
        self._sharded = sharded
        self._wrapped = (layer.weights.gate_up, layer.weights.down)

    def check_weights(self, module: Any) -> None:
        """Raise :class:`MoegraftError` when the module holds other weights than were wrapped."""
        if _WEIGHTS in module.__dict__:
            return  # its own parameters are empty
        gated = self.layer.weights.layout.gated
        gate_up = module.gate_up_proj if gated else module.up_proj
        for now, wrapped in zip((gate_up, module.down_proj), self._wrapped, strict=True):
            if now.data_ptr() != wrapped.data_ptr() or now.dtype != wrapped.dtype:
                raise MoegraftError(
                    f"The weights of a {type(module).__name__} were replaced after attach() "
                    "(moved, cast, reloaded or wrapped by PEFT): detach() and attach() again. "
                    "Loading a state dict in place (without assign=True) needs neither."
                )

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        repeats: int = 1,
    ) -> torch.Tensor:
        """``[N, H], [N, K], [N, K] -> [N, H]``; the step's tokens come ``repeats`` times."""
        slots, table = self.state.current, self.layer.table
        if slots is not None and repeats > 1:
            slots = slots.derived(("repeated", repeats), 0, partial(_repeated, slots, repeats))
        if slots is not None and table is not None and not table.has_delta(slots):
            slots = None  # adapters of other sites: the base's launches only
        if torch.is_grad_enabled() and hidden.requires_grad:
            if self._sharded and slots is not None:
                raise MoegraftError(
                    "A sharded model with adapters runs without gradients only: with them, its "
                    "ranks exchange rows, which would lose their adapters. Use torch.no_grad()."
                )
            _warn_no_gradients()
        with torch.no_grad():
            return self.layer(hidden, topk_ids, topk_weights, slots)


def _repeated(slots: TokenSlots, repeats: int) -> TokenSlots:
    """The slots of all tokens, several times one after the other."""
    return TokenSlots(slots.slots.repeat(repeats), slots.live, in_graph=slots.in_graph)


@cache
def _warn_no_gradients() -> None:
    logger.warning(
        "An attached model runs with gradients enabled: moegraft is for inference, no gradient "
        "reaches the experts. Use torch.no_grad(), or detach() before training."
    )


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The registered experts function: ``[N, H], [N, K], [N, K] -> [N, H]``."""
    graft = module.__dict__.get(_GRAFT)
    if graft is None:
        raise MoegraftError(
            f"A model runs experts_implementation={IMPLEMENTATION!r} but its "
            f"{type(module).__name__} is not attached: call moegraft.attach(model). A model that "
            "shares its config object with an attached one needs a config of its own."
        )
    graft.check_weights(module)
    output: torch.Tensor = graft(hidden_states, top_k_index, top_k_weights)
    return output


def register() -> None:
    """Add :func:`experts_forward` to transformers' registry; safe to call again."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, experts_forward)


def is_attached(module: nn.Module) -> bool:
    """True when an experts module carries a graft."""
    return _GRAFT in module.__dict__


def set_graft(module: nn.Module, graft: ExpertsGraft | None) -> None:
    """Attach a graft to an experts module, or take it off again."""
    if graft is None:
        module.__dict__.pop(_GRAFT, None)
    else:
        module.__dict__[_GRAFT] = graft


def hold_weights(module: nn.Module, weights: ExpertWeights) -> None:
    """Give an experts module weights in place of its own, which may be on the meta device."""
    module.__dict__[_WEIGHTS] = weights


def holds_weights(module: nn.Module) -> bool:
    """True for an experts module whose own parameters stand for weights outside of it."""
    return _WEIGHTS in module.__dict__


def expert_weights(path: str, module: Any) -> ExpertWeights:
    """Wrap an experts module's parameters, of this rank, in place; or what it holds instead.

    Raises:
        UnsupportedError: a dtype that has no implementation, or a norm behind sliced experts.
    """
    held: ExpertWeights | None = module.__dict__.get(_WEIGHTS)
    if held is not None:
        return replace(held, post_norm=_post_norm(path, module))
    layout = weight_layout(module)
    gate_up = module.gate_up_proj if layout.gated else module.up_proj
    if gate_up.dtype not in _SERVED_DTYPES:
        raise UnsupportedError(
            f"{path} holds {gate_up.dtype} weights; served in place are float32, bfloat16 and "
            "float16. Load the model with moegraft.hosts.transformers.load_quantised, or with "
            "dtype=torch.bfloat16 and dequantised."
        )
    bias_name = "gate_up_proj_bias" if layout.gated else "up_proj_bias"
    return ExpertWeights(
        gate_up=local(gate_up),
        down=local(module.down_proj),
        gate_up_bias=_bias(module, bias_name),
        down_bias=_bias(module, "down_proj_bias"),
        activation=find_activation(module, layout),
        layout=layout,
        post_norm=_post_norm(path, module),
    )


def _post_norm(path: str, module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if not getattr(module, "has_post_expert_norm", False):
        return None
    if local(module.down_proj).shape != module.down_proj.shape and not module._is_expert_parallel:
        raise UnsupportedError(
            f"{path} has a norm behind its experts, which needs whole rows, but the experts are "
            "sliced over ranks: load the model with expert parallelism instead."
        )
    norm: Callable[[torch.Tensor], torch.Tensor] = module.post_expert_norm
    return norm


def _bias(module: Any, name: str) -> torch.Tensor | None:
    parameter = getattr(module, name, None) if getattr(module, "has_bias", False) else None
    return None if parameter is None else local(parameter)


def find_activation(module: Any, layout: WeightLayout) -> Activation:
    """Recognise a module's activation by running it on probe values.

    The host's own function is the authority: a known formula is used only if it gives the same
    numbers; otherwise the host's function itself is called on the packed rows.
    """
    width = 16
    generator = torch.Generator().manual_seed(0)
    # Wide enough to reach the clamps of gpt_oss-like activations.
    columns = width * (2 if layout.gated else 1)
    probe = torch.randn(64, columns, generator=generator, dtype=torch.float32) * 8
    function = getattr(module, "_apply_gate", None) if layout.gated else module.act_fn
    if function is None:
        function = partial(_default_gate, module.act_fn)
    device = module.down_proj.device if module.down_proj.device.type != "meta" else "cpu"
    with torch.no_grad():
        expected = function(probe.to(device)).float().cpu()
        for candidate in _candidates(module):
            found = apply_activation(probe, candidate, layout, width)
            if torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
                return candidate
    return Activation("custom", custom=function)


def _default_gate(act_fn: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """What a class without a function for it does: ``act(gate) * up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    found: torch.Tensor = act_fn(gate) * up
    return found


def _candidates(module: nn.Module) -> list[Activation]:
    found = [Activation(kind) for kind in _KINDS]
    for prefix in ("", "swiglu_"):
        limit = getattr(module, f"{prefix}limit", None)
        alpha = getattr(module, f"{prefix}alpha", None)
        if isinstance(limit, (int, float)):
            for kind in _KINDS:
                found.append(Activation(kind, limit=float(limit)))
            if isinstance(alpha, (int, float)):
                for shift in (1.0, 0.0):
                    found.append(Activation("silu", float(limit), float(alpha), shift))
    return found
