"""What the GPU tests of layers share: one tile config, one set of adapters, all modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.unfused import run_unfused
from moegraft.call import LayerCall, Mode
from moegraft.factor_table import SiteTable
from moegraft.sites import Site, expert_site
from moegraft.testing import (
    LayerCase,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    layer_case,
    poisoned_empty,
    random_factors,
)
from moegraft.types import SiteFactors, TokenSlots, WeightLayout

#: One config for nearly all cases, so that few kernels are compiled.
CONFIG = FusedConfig(
    16, GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3)
)
#: The delta's programs lead the GEMMs' launches, each with a part of the columns.
MERGED = replace(CONFIG, merged=True, gate_up_splits=2, down_splits=4, delta_programs=100)
FEW_PROGRAMS = replace(CONFIG, delta_programs=40)
EXPERTS, HIDDEN, INTERMEDIATE = 8, 256, 128
#: The kinds of adapters take turns over these.
RANKS = (1, 3, 8, 12, 16, 20, 64, 128, 256)
KINDS = ("fused", "separate", "shared_outer")
#: Slot per token, repeated: all adapters of :func:`mixed_adapters`, an empty slot, none.
TOKEN_SLOTS = (0, 1, -1, 2, 3, 12, 4, 5, 6, -1, 7, 8, 9, 10, 11)
ALL_MODES: tuple[Mode, ...] = ("in_kernel", "fused_serial", "two_stream", "serial")
#: One of each pair of modes with equal bits.
TWO_MODES: tuple[Mode, ...] = ("in_kernel", "serial")


def mixed_adapters(site: Site, dtype: torch.dtype) -> list[SiteFactors | None]:
    """Return 13 slots: every rank, every kind, some experts or projections only, an empty one."""
    found: list[SiteFactors | None] = [
        random_factors(site, rank, KINDS[i % 3], seed=i, dtype=dtype)
        for i, rank in enumerate(RANKS)
    ]
    found += [
        random_factors(site, 8, experts=[5, 0, 2], seed=20, dtype=dtype),
        random_factors(site, 4, projections=["up"], seed=21, dtype=dtype),
        random_factors(site, 16, projections=["down"], seed=22, dtype=dtype),
        None,
    ]
    return found


def mixed_case(
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: WeightLayout | None = None,
    sizes: tuple[int, int, int] = (EXPERTS, HIDDEN, INTERMEDIATE),
    **options: Any,
) -> LayerCase:
    """Return a case on the GPU with :func:`mixed_adapters`; ``sizes`` are E, H and I."""
    site = expert_site("experts", *sizes, layout)
    return layer_case(
        num_tokens,
        mixed_adapters(site, dtype),
        TOKEN_SLOTS,
        num_experts=sizes[0],
        hidden=sizes[1],
        intermediate=sizes[2],
        layout=layout,
        dtype=dtype,
        device="cuda",
        **options,
    )


@dataclass(frozen=True)
class GpuCase:
    """A case with its table on the GPU, which is made once."""

    case: LayerCase
    config: FusedConfig = CONFIG

    @cached_property
    def table(self) -> SiteTable:
        """The adapters' factors."""
        return self.case.table()

    @cached_property
    def slots(self) -> TokenSlots:
        """The slot of each token."""
        return self.case.slots()

    def call(self, base: bool = False) -> LayerCall:
        """Return the call, into an output full of NaN."""
        case = self.case
        return LayerCall(
            case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights, self.table,
            None if base else self.slots, case.expert_offset, case.scale,
            torch.full_like(case.x, torch.nan),
        )  # fmt: skip

    def run(self, mode: Mode, base: bool = False) -> torch.Tensor:
        """Run it in a mode, on poisoned memory."""
        with poisoned_empty():
            return run_mode(self.call(base), mode, self.config)

    def check(self, modes: Sequence[Mode] = ALL_MODES) -> dict[Mode, torch.Tensor]:
        """Compare every mode with the reference, with itself and with the mode of equal bits."""
        case, dtype = self.case, self.case.x.dtype
        ref, ref_base = case.reference(), case.reference(base=True)
        unrounded, unrounded_base = case.unrounded(), case.unrounded(base=True)
        plain = torch.tensor([s < 0 or case.adapters[s] is None for s in case.token_slots]).bool()
        found: dict[Mode, torch.Tensor] = {}
        for mode in modes:
            with_lora, base = self.run(mode), self.run(mode, base=True)
            assert_close(base, ref_base, dtype, unrounded_base)
            assert_close(with_lora, ref, dtype, unrounded)
            w8a8 = unrounded is not None
            assert_delta_close(with_lora, base, ref, ref_base, w8a8)
            assert_bit_equal(with_lora[plain], base[plain], f"{mode}: rows without an adapter")
            assert_bit_equal(self.run(mode), with_lora, f"{mode}: two runs")
            found[mode] = with_lora
        for one, other in (("in_kernel", "fused_serial"), ("two_stream", "serial")):
            if one in found and other in found:
                assert_bit_equal(found[one], found[other], f"{one} and {other}")
        return found


def run_mode(call: LayerCall, mode: Mode, config: FusedConfig) -> torch.Tensor:
    """Run a call in a mode with these tiles."""
    if mode in ("two_stream", "serial"):
        return run_unfused(call, config, two_stream=mode == "two_stream")
    if mode == "fused_serial":
        return run_layer(call, config.overlapping(False))
    return run_layer(call, config.overlapping(device_facts().has_dependent_launch))
