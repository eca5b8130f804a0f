"""Layers with quantised weights on the Triton backend, in its interpreter, in every mode."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from moegraft.backends.triton import FORMATS
from moegraft.call import Mode
from moegraft.sites import expert_site
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_case,
    layer_case,
    random_factors,
)

MODES: tuple[Mode, ...] = ("in_kernel", "fused_serial", "two_stream", "serial")
#: H and I of partial blocks, tiles and groups.
HIDDEN, INTERMEDIATE = 160, 144


def quantised_case(
    name: str, layout: str = "gate_first", activation: str = "silu", tokens: int = 7, **options: Any
) -> LayerCase:
    """A case with every kind of adapter, ranks above one product's, an empty slot, -1 ids."""
    dtype = options.get("dtype", torch.float32)
    site = expert_site("experts", 5, HIDDEN, INTERMEDIATE, LAYOUTS[layout])
    adapters = [
        None,
        random_factors(site, 3, "fused", scale=0.25, seed=1, dtype=dtype),
        random_factors(site, 12, "separate", experts=[4, 0, 2], scale=8.0, seed=2, dtype=dtype),
        random_factors(site, 70, "shared_outer", seed=4, dtype=dtype),
        random_factors(site, 5, projections=["down"], seed=5, dtype=dtype),
    ]
    return layer_case(
        tokens,
        adapters,
        [-1, 0, 1, 2, 3, 4, -1],
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        layout=LAYOUTS[layout],
        activation=ACTIVATIONS[activation],
        minus_ones=0.1,
        scale=2.5,
        weight_format=name,
        **{"biases": True, **options},
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_mode_matches_the_reference(name: str, mode: Mode) -> None:
    case = quantised_case(name)
    layer = case.layer("triton", mode)
    assert layer.plan(7, 2).mode == mode
    assert_case(case, layer)
