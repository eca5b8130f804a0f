"""The layouts and activations that every backend is tested on, by name."""

from __future__ import annotations

import torch

from moegraft.types import Activation, WeightLayout

#: Every order and storage of the gate_up columns.
LAYOUTS = {
    "gate_first": WeightLayout("gate_first"),
    "up_first": WeightLayout("up_first"),
    "interleaved": WeightLayout("interleaved"),
    "no_gate": WeightLayout("no_gate"),
    "gate_first_in_major": WeightLayout("gate_first", out_major=False),
    "interleaved_in_major": WeightLayout("interleaved", out_major=False),
    "no_gate_in_major": WeightLayout("no_gate", out_major=False),
}


def tanh_glu(gate_up: torch.Tensor) -> torch.Tensor:
    """``tanh(gate) * up`` from ``[N, 2I]`` gate-first rows: an activation only its host knows."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.tanh(gate) * up


#: ``clamped`` is gpt_oss with a limit low enough to act on random inputs. ``custom`` needs the
#: layout ``gate_first``.
ACTIVATIONS = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu"),
    "relu2": Activation("relu2"),
    "clamped": Activation("silu", limit=0.7, alpha=1.702, up_shift=1.0),
    "custom": Activation("custom", custom=tanh_glu),
}
