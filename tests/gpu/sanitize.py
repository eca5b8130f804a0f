"""Small layers in every mode, for a memory checker; run by hand:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

from moegraft.backends.triton import FORMATS
from moegraft.call import Mode
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site, linear_site
from moegraft.testing import layer_case, random_factors
from moegraft.testing.cases import assert_case, table_on
from moegraft.types import TokenSlots, WeightLayout

MODES: tuple[Mode, ...] = ("in_kernel", "fused_serial", "two_stream", "serial")


def check_layers() -> None:
    """Run odd and even sizes, layouts with and without a gate: few, a checker is slow."""
    for layout, hidden, intermediate, tokens in (
        (WeightLayout(), 72, 40, 5),
        (WeightLayout("no_gate"), 72, 40, 40),
        (WeightLayout("interleaved", False), 256, 128, 1),
    ):
        check_case(layout, hidden, intermediate, tokens, None)


def check_quantised() -> None:
    """Run every format: sizes of partial blocks, tiles and groups, and whole ones."""
    for name in FORMATS:
        check_case(WeightLayout(), 320, 144, 5, name)
        check_case(WeightLayout("up_first"), 256, 128, 1, name)


def check_case(
    layout: WeightLayout, hidden: int, intermediate: int, tokens: int, weight_format: str | None
) -> None:
    """Run a layer with adapters of every kind in every mode."""
    site = expert_site("experts", 6, hidden, intermediate, layout)
    adapters = [
        random_factors(site, 3, "fused", seed=1),
        random_factors(site, 20, "separate", seed=2),
        None,
        random_factors(site, 16, "shared_outer", seed=3),
        random_factors(site, 8, "separate", experts=[0, 3], seed=4),
    ]
    case = layer_case(
        tokens,
        adapters,
        [0, 1, -1, 3, 2, 4],
        num_experts=6,
        hidden=hidden,
        intermediate=intermediate,
        layout=layout,
        dtype=torch.bfloat16,
        minus_ones=0.1,
        biases=True,
        device="cuda",
        weight_format=weight_format,
    )
    for mode in MODES:
        layer = MoeLoraLayer(case.weights, case.table(), mode=mode)
        assert_case(case, layer)
        print(weight_format, layout.gate_up_order, tokens, mode, flush=True)
    torch.cuda.synchronize()


def check_linears() -> None:
    """Run three linears that share x, of odd sizes."""
    from moegraft.backends.triton.stages import STAGES
    from moegraft.factor_table import site_table

    sizes = (40, 24, 130)
    tables = []
    for n in sizes:
        site = linear_site("linear", 72, n)
        factors = [random_factors(site, rank, seed=rank) for rank in (3, 16, 33)]
        tables.append(table_on(site_table(site, factors, torch.bfloat16), "cuda"))
    for tokens in (1, 7):
        x = torch.randn(tokens, 72, device="cuda", dtype=torch.bfloat16)
        outs = [torch.zeros(tokens, n, device="cuda", dtype=torch.bfloat16) for n in sizes]
        slots = TokenSlots.of([(t % 4) - 1 for t in range(tokens)], "cuda")
        STAGES.linear_lora_group(x, tables, slots, outs)
    torch.cuda.synchronize()


if __name__ == "__main__":
    check_layers()
    check_quantised()
    check_linears()
    print("done")
