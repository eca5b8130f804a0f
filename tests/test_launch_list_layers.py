"""Whole layers by list, in Triton's interpreter: equal bits, whichever layer made the list.

The interpreter has no compiled kernels, so a list here holds the kernel and what each tensor was
besides its address; all else is as on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from moegraft.backends.launch_list import LaunchLists, Watch
from moegraft.backends.triton import linear_lora, listed
from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.device import is_interpreted
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.linear_lora import LinearTile
from moegraft.backends.triton.listed_layer import ListedLayer
from moegraft.backends.triton.prefill.config import PrefillConfig
from moegraft.backends.triton.prefill.layer import run_prefill
from moegraft.call import LayerCall, LayerRun
from moegraft.factor_table import SiteTable
from moegraft.sites import expert_site, linear_site
from moegraft.testing import layer_case, random_factors
from moegraft.testing.cases import LayerCase
from moegraft.types import SiteFactors, TokenSlots

if not is_interpreted():
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 3, 32, 32, 5
TILE = GemmConfig(32, 32, 4, 2)
DECODE = FusedConfig(16, TILE, TILE, GemmConfig(16, 32, 4, 2))
MERGED = replace(DECODE, merged=True, gate_up_splits=2, down_splits=3, delta_programs=7)
PREFILL = PrefillConfig(32, tail_m=16, gate_up=TILE, down=TILE, shrink=TILE, wide_shrink=TILE)
RUNS: dict[str, tuple[LayerRun, PrefillConfig | None]] = {
    "decode": (partial(run_layer, config=DECODE), None),
    "merged": (partial(run_layer, config=MERGED), None),
    "prefill": (partial(run_prefill, config=PREFILL, other=DECODE), PREFILL),
}


class Lists(LaunchLists):
    """Lists on the CPU."""

    def run(self, kind: Hashable, inputs: Sequence[torch.Tensor], plain: Callable[[], Any]) -> None:
        self.run_on(kind, 7, inputs, plain)


class Launch:
    """A launch of an interpreted kernel, its tensors made anew from their addresses."""

    def __init__(self, kernel: Any, grid: Any, args: Any, kwargs: Any, watch: Watch) -> None:
        self.kernel, self.grid = kernel, grid
        self.args = [self._described(value, watch) for value in args]
        self.kwargs = {name: self._described(value, watch) for name, value in kwargs.items()}

    def _described(self, value: Any, watch: Watch) -> Any:
        if isinstance(value, TensorDescriptor):
            base = self._described(value.base, watch)
            return lambda bases: TensorDescriptor(
                base(bases), value.shape, value.strides, value.block_shape
            )
        if not isinstance(value, torch.Tensor):
            return lambda bases: value
        place = watch.place(value.data_ptr())
        shape, strides, dtype = value.shape, value.stride(), value.dtype
        return lambda bases: at_address(bases[place.source] + place.offset, shape, strides, dtype)

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        args = [value(bases) for value in self.args]
        kwargs = {name: value(bases) for name, value in self.kwargs.items()}
        self.kernel[self.grid](*args, **kwargs)


def at_address(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class Watched:
    """What :func:`listed.listed` returns while a call is watched."""

    def __init__(self, kernel: Any, watch: Watch) -> None:
        self.kernel, self.watch = kernel, watch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():  # the interpreter itself works with torch
                self.kernel[grid](*args, **kwargs)
            self.watch.add(lambda watch: Launch(self.kernel, grid, args, kwargs, watch))

        return launch


@pytest.fixture(autouse=True)
def interpreted_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "_Watched", Watched)


def layer_inputs(seed: int, **options: Any) -> LayerCase:
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE, options.get("layout"))
    held: list[SiteFactors | None] = [
        random_factors(site, 8, "separate", seed=seed),
        random_factors(site, 3, "fused", seed=seed + 1),
        None,
        random_factors(site, 16, "shared_outer", seed=seed + 2),
    ]
    settings: dict[str, Any] = {"biases": True, "minus_ones": 0.2, "scale": 1.5, "seed": seed}
    return layer_case(
        TOKENS, held, [(seed + i) % 5 - 1 for i in range(5)], num_experts=EXPERTS, hidden=HIDDEN,
        intermediate=INTERMEDIATE, **settings | options,
    )  # fmt: skip


def call_of(case: LayerCase, base: bool, with_out: bool = True) -> LayerCall:
    routing, table = case.routing, case.table()
    object.__setattr__(table, "max_rank", 16)  # as a bank's, whatever it holds
    return LayerCall(
        case.x, routing.topk_ids, routing.topk_weights, case.weights, table,
        None if base else case.slots(), case.expert_offset, case.scale,
        torch.full_like(case.x, torch.nan) if with_out else None,
    )  # fmt: skip


@pytest.mark.parametrize("base", [False, True], ids=["adapters", "base"])
@pytest.mark.parametrize("name", RUNS)
def test_layers_by_list_have_the_plain_ways_bits(name: str, base: bool) -> None:
    run, tiles = RUNS[name]
    plain = 0

    def counted(call: LayerCall) -> torch.Tensor:
        nonlocal plain
        plain += 1
        return run(call)

    layer = ListedLayer(counted, tiles)
    layer.lists = Lists()
    for seed in range(4):
        case = layer_inputs(10 * seed)
        found = layer(call_of(case, base, with_out=seed != 3))
        assert torch.equal(found, run(call_of(case, base))), seed
    assert plain == 2, layer.lists.refusals


def test_quantised_layers_by_list() -> None:
    run = RUNS["decode"][0]
    layer = ListedLayer(run)
    layer.lists = Lists()
    for seed in range(4):
        case = layer_inputs(10 * seed, biases=False, weight_format="fp8-channel")
        found = layer(call_of(case, base=False))
        assert torch.equal(found, run(call_of(case, base=False))), seed
    assert not layer.lists.refusals


def test_a_weight_that_gets_memory_of_another_order_makes_another_kind() -> None:
    run = RUNS["decode"][0]
    layer = ListedLayer(run)
    layer.lists = Lists()
    call = call_of(layer_inputs(1, biases=False), base=False)
    for _ in range(3):
        expected = layer(call).clone()
    weight = call.weights.gate_up
    other = torch.empty(weight.transpose(1, 2).shape, dtype=weight.dtype).transpose(1, 2)
    weight.data = other.copy_(weight)
    assert torch.equal(layer(call), run(call))
    torch.testing.assert_close(layer(call), expected)


def test_what_decides_launches_makes_another_kind() -> None:
    run, tiles = RUNS["decode"]
    layer = ListedLayer(run, tiles)
    layer.lists = Lists()
    case = layer_inputs(1)
    first = call_of(case, base=False)
    wide = torch.randn(TOKENS, 2 * HIDDEN)
    variants = [
        first,
        replace(first, slots=None),
        replace(first, table=None, slots=None),
        replace(first, scale=0.5),
        replace(first, expert_offset=2),
        replace(first, topk_ids=first.topk_ids.long()),
        replace(first, topk_weights=first.topk_weights.half()),
        replace(first, x_TH=wide[:, :HIDDEN]),
        replace(first, out=wide[:, HIDDEN:]),
        replace(first, weights=replace(first.weights, down_bias=None)),
    ]
    wanted = [run(replace(call, out=torch.empty(TOKENS, HIDDEN))) for call in variants]
    for _ in range(3):
        for call, expected in zip(variants, wanted, strict=True):
            assert torch.equal(layer(call), expected)
    assert not layer.lists.refusals


def test_copies_and_pieces_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer_inputs(1)
    call = call_of(case, base=False)
    run, tiles = RUNS["decode"]
    layer = ListedLayer(run, tiles)
    layer.lists = Lists()
    expected = run(call).clone()
    ids = call.topk_ids.t().contiguous().t()
    for _ in range(4):
        assert torch.equal(layer(replace(call, topk_ids=ids)), expected)
    assert "clone" in layer.lists.refusals[0]
    run, tiles = RUNS["prefill"]
    layer = ListedLayer(run, tiles)
    layer.lists = Lists()
    monkeypatch.setattr(
        "moegraft.backends.triton.prefill.layer.max_pairs", lambda weights, table=None: 6
    )
    for _ in range(3):
        torch.testing.assert_close(layer(call), expected)
    assert len(layer.lists.refusals) == 1 and "pieces" in layer.lists.refusals[0]


def test_linears_by_list(monkeypatch: pytest.MonkeyPatch) -> None:
    from linear_cases import bank_tables

    lists = Lists()
    monkeypatch.setattr(linear_lora, "_lists", lists)
    launches: list[None] = []
    launch_tile = linear_lora._launch_tile

    def counted(*args: Any) -> None:
        launches.append(None)
        launch_tile(*args)

    monkeypatch.setattr(linear_lora, "_launch_tile", counted)
    sites = tuple(linear_site(f"{i}", 43, width) for i, width in enumerate((67, 16, 33)))
    tile = LinearTile(16, 32, 2, 64, 16)
    slots = TokenSlots.of([i % 8 - 1 for i in range(TOKENS)])
    for seed in range(4):
        tables, _ = bank_tables(sites, torch.float32, "cpu", seed)
        torch.manual_seed(seed)
        x, y = torch.randn(TOKENS, 43), torch.randn(TOKENS, 116)
        expected = y.clone()
        one_by_one(x, tables, slots, expected, tile)
        before = len(launches)
        linear_lora.linear_lora_group(x, tables, slots, y.split([67, 16, 33], 1), tile=tile)
        assert len(launches) - before == (seed < 2)
        assert torch.equal(y, expected) and not lists.refusals


def one_by_one(
    x: torch.Tensor,
    tables: Sequence[SiteTable],
    slots: TokenSlots,
    y: torch.Tensor,
    tile: LinearTile,
) -> None:
    """Do the same one linear at a time, without a list."""
    start = 0
    for table in tables:
        width = table.site.projections[0].out_features
        found = linear_lora.token_segments(slots, table.num_slots, tile.block_m)
        out = y[:, start : start + width]
        linear_lora._launch_tile(x, (table,), found, (out,), tile, False)
        start += width
