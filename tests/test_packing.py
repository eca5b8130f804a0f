"""Packing: equal adapters give equal bytes, whatever order and place their tensors had."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moegraft.adapters import (
    AdapterBank,
    ModelSpec,
    ReadOptions,
    bind,
    check_bound,
    make_source,
    read_adapter,
)
from moegraft.adapters.checksum import checksum_of
from moegraft.factors import SCALE_F32, PackedAdapter, TableLayout
from moegraft.packing import pack_adapter, packed_bytes, plan_adapter
from moegraft.sites import expert_site, linear_site
from moegraft.testing import assert_same_factors, random_adapter
from moegraft.types import SiteFactors

SITES = (expert_site("layers.0.experts", 12, 16, 8), linear_site("layers.0.q_proj", 16, 10))
LAYOUT = TableLayout.of(SITES)
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def per_expert(
    seed: int = 0, experts: tuple[int, ...] = tuple(range(12))
) -> dict[str, torch.Tensor]:
    """The experts of a random adapter of rank 3 as tensors of their own."""
    factors = random_adapter(SITES[:1], 3, seed=seed).factors["layers.0.experts"]
    return {
        f"layers.0.mlp.experts.{expert}.{NAMES[name]}.{leaf}.weight": getattr(factor, leaf)[expert]
        for name, factor in factors.projections.items()
        for expert in experts
        for leaf in ("lora_A", "lora_B")
    }


def bound(tensors: dict[str, torch.Tensor]) -> SiteFactors:
    found = bind(make_source(tensors, {"r": 3, "lora_alpha": 3}), ModelSpec(SITES))
    check_bound(found.report, ModelSpec(SITES))
    return found.factors["layers.0.experts"]


def in_one_memory(tensors: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """The same tensors as views of one buffer, in this order."""
    flat = torch.cat([tensors[name].reshape(-1) for name in names])
    starts = [0, *itertools.accumulate(tensors[name].numel() for name in names)]
    return {
        name: flat[start : start + tensors[name].numel()].view(tensors[name].shape)
        for name, start in zip(names, starts, strict=False)
    }


@pytest.mark.parametrize("experts", [tuple(range(12)), (0, 3, 10, 11)], ids=["all", "some"])
def test_a_file_of_single_experts_is_bound_without_a_copy_and_packed_in_their_order(
    tmp_path: Path, experts: tuple[int, ...]
) -> None:
    tensors = per_expert(experts=experts)
    wanted = pack_adapter({"layers.0.experts": bound(tensors)}, LAYOUT, torch.float32)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 3}')
    source = read_adapter(tmp_path)
    found = bind(source, ModelSpec(SITES)).factors["layers.0.experts"]
    memory = {t.untyped_storage().data_ptr() for t in source.tensors.values()}
    for factor in found.projections.values():
        assert {factor.lora_A.untyped_storage().data_ptr()} == memory
        assert {factor.lora_B.untyped_storage().data_ptr()} == memory
    packed = pack_adapter({"layers.0.experts": found}, LAYOUT, torch.float32)
    assert torch.equal(packed.row, wanted.row)
    assert torch.equal(packed.data, wanted.data)


@pytest.mark.parametrize("seed", range(4))
def test_tensors_in_any_order_of_one_memory_pack_to_the_same_bytes(seed: int) -> None:
    tensors = per_expert(seed)
    wanted = pack_adapter({"layers.0.experts": bound(tensors)}, LAYOUT, torch.bfloat16)
    names = list(tensors)
    for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist():
        names.append(names.pop(i))
    found = bound(in_one_memory(tensors, names))
    packed = pack_adapter({"layers.0.experts": found}, LAYOUT, torch.bfloat16)
    assert torch.equal(packed.row, wanted.row)
    assert torch.equal(packed.data, wanted.data)


def test_entries_in_another_order_pack_to_the_same_bytes_with_shared_factors_too() -> None:
    plain = random_adapter(SITES, 3, seed=1).factors
    experts = plain["layers.0.experts"]
    up = experts.projections["up"]
    shared = replace(up, lora_B=up.lora_B[:1])
    plain = {**plain, "layers.0.experts": SiteFactors({**experts.projections, "up": shared})}
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    places = order.argsort().int()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.shape[0] == 1 else tensor[order]

    mixed = SiteFactors(
        {
            name: replace(f, lora_A=moved(f.lora_A), lora_B=moved(f.lora_B))
            for name, f in plain["layers.0.experts"].projections.items()
        },
        places,
    )
    wanted = pack_adapter(plain, LAYOUT, torch.float32)
    found = pack_adapter({**plain, "layers.0.experts": mixed}, LAYOUT, torch.float32)
    assert torch.equal(found.row, wanted.row)
    assert torch.equal(found.data, wanted.data)


def test_entries_in_another_order_may_be_on_another_device_than_where_they_go() -> None:
    factors = random_adapter(SITES[:1], 3).factors["layers.0.experts"]
    backwards = SiteFactors(factors.projections, torch.arange(11, -1, -1, dtype=torch.int32))
    plan = plan_adapter({SITES[0].name: backwards}, LAYOUT, torch.float32)
    assert any(piece.order is not None and not piece.is_b for piece in plan.pieces)
    plan.fill(torch.empty(plan.elements, device="meta"))  # the only other device of every machine


def test_an_entry_that_two_experts_read_is_stored_once() -> None:
    factors = random_adapter(SITES[:1], 2, seed=3).factors["layers.0.experts"]
    two = {
        n: replace(f, lora_A=f.lora_A[:2], lora_B=f.lora_B[:2])
        for n, f in factors.projections.items()
    }
    expert_map = torch.tensor([1, 0, 0, 1, *[-1] * 8], dtype=torch.int32)
    packed = pack_adapter({"layers.0.experts": SiteFactors(two, expert_map)}, LAYOUT, torch.float32)
    assert packed.num_bytes == 2 * sum(
        (f.lora_A[0].numel() + f.lora_B[0].numel()) * 4 for f in factors.projections.values()
    )
    stored = LAYOUT.expert_map(packed.row, SITES[0])
    assert stored is not None and torch.equal(stored, expert_map)


def test_what_no_factor_fills_is_zero() -> None:
    factors = random_adapter(SITES, 3, seed=2).factors  # 10 values per row of B, stored as 12
    filled = torch.full((packed_bytes(factors, LAYOUT, torch.float32) // 4,), torch.nan)
    plan_adapter(factors, LAYOUT, torch.float32).fill(filled)
    assert bool(torch.isfinite(filled).all())
    assert torch.equal(filled, pack_adapter(factors, LAYOUT, torch.float32).data)


def test_a_file_of_exactly_the_models_factors_is_packed_inside_of_its_own_memory(
    tmp_path: Path,
) -> None:
    sites = tuple(expert_site(f"layers.{i}.experts", 12, 16, 8) for i in range(11))
    layout, spec = TableLayout.of(sites), ModelSpec(sites)
    tensors = {
        name.replace("layers.0.", f"layers.{i}."): tensor
        for i in range(11)
        for name, tensor in per_expert(seed=i).items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 3}')

    def packed(own: bool) -> PackedAdapter:
        source = read_adapter(tmp_path)
        assert source.memory is not None
        memory = source.memory if own else None
        found = pack_adapter(bind(source, spec).factors, layout, torch.float32, memory=memory)
        assert (found.data.data_ptr() == source.memory.data_ptr()) == own
        return found

    plain, inside = packed(False), packed(True)
    assert plain.num_bytes == inside.num_bytes
    assert list(plain.spans) == list(inside.spans) == [site.name for site in sites]
    assert plain.spans != inside.spans  # layers.10 lies behind layers.1 in the file
    for site, (begin, end) in plain.spans.items():
        own_begin, own_end = inside.spans[site]
        assert torch.equal(inside.data[own_begin:own_end], plain.data[begin:end])
    assert checksum_of(plain, layout) == checksum_of(inside, layout)
    for which in (plain, inside):
        bank = AdapterBank(sites, num_slots=1, max_rank=3, dtype=torch.float32)
        bank.write(0, "a", which)
        for site in sites:
            wanted = bind(read_adapter(tmp_path), spec).factors[site.name]
            assert_same_factors(bank.site_table(site.name).factors(0), wanted, site)


@pytest.mark.parametrize("what", ["dtype", "more in the file", "one expert's rank"])
def test_a_file_that_does_not_fit_its_own_memory_is_packed_elsewhere(
    tmp_path: Path, what: str
) -> None:
    tensors = per_expert()
    skip: tuple[str, ...] = ()
    if what == "more in the file":
        skip = ("down_proj",)
    elif what == "one expert's rank":
        for leaf, dim in (("lora_A", 0), ("lora_B", 1)):
            key = f"layers.0.mlp.experts.5.up_proj.{leaf}.weight"
            tensors[key] = tensors[key].narrow(dim, 0, 2).contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 3}')
    dtype = torch.bfloat16 if what == "dtype" else torch.float32
    source = read_adapter(tmp_path)
    assert source.memory is not None
    found = bind(source, ModelSpec(SITES), ReadOptions(skip=skip))
    check_bound(found.report, ModelSpec(SITES))
    before = source.memory.clone()
    wanted = pack_adapter(found.factors, LAYOUT, dtype)
    packed = pack_adapter(found.factors, LAYOUT, dtype, memory=source.memory)
    assert torch.equal(source.memory, before)
    assert torch.equal(packed.row, wanted.row) and torch.equal(packed.data, wanted.data)


@pytest.mark.parametrize("change", ["a value", "two values", "a scale", "nothing"])
def test_the_checksum_sees_every_change(change: str) -> None:
    factors = random_adapter(SITES, 3, seed=2).factors
    packed = pack_adapter(factors, LAYOUT, torch.float32)
    before = checksum_of(packed, LAYOUT)
    if change == "a value":
        packed.data[5] += 1
    elif change == "two values":  # exchanged, so plain sums are the same
        packed.data[[3, 40]] = packed.data[[40, 3]]
    elif change == "a scale":
        LAYOUT.records(packed.row, SITES[0]).view(torch.float32)[0, SCALE_F32] *= 2
    assert (checksum_of(packed, LAYOUT) == before) == (change == "nothing")


def test_the_checksum_of_many_blocks_depends_on_their_order() -> None:
    row, spans = torch.zeros(LAYOUT.row_words, dtype=torch.int64), {"x": (0, 5 * 65536 + 8)}
    data = torch.randn(5 * 65536 + 8, generator=torch.Generator().manual_seed(0))
    first = checksum_of(PackedAdapter(data, row, 3, spans), LAYOUT)
    moved = torch.cat([data[65536:131072], data[:65536], data[131072:]])
    assert checksum_of(PackedAdapter(moved, row, 3, spans), LAYOUT) != first
    moved = data.clone()
    moved[-1] += 1
    assert checksum_of(PackedAdapter(moved, row, 3, spans), LAYOUT) != first


@pytest.mark.parametrize("shared", ["A", "A and B"])
def test_what_all_experts_share_gives_the_same_bytes_from_single_experts_and_from_stacks(
    shared: str,
) -> None:
    tensors = per_expert()
    for name in list(tensors):
        if "lora_A" in name or shared == "A and B":
            first = re.sub(r"experts\.\d+", "experts.0", name)
            tensors[name] = tensors[first].clone()
    scattered = bound(tensors)
    in_file_order = bound(in_one_memory(tensors, sorted(tensors)))
    assert in_file_order.expert_map is not None, "0, 1, 10, .. is not the order of experts"
    wanted = pack_adapter({"layers.0.experts": scattered}, LAYOUT, torch.float32)
    found = pack_adapter({"layers.0.experts": in_file_order}, LAYOUT, torch.float32)
    assert torch.equal(found.row, wanted.row) and torch.equal(found.data, wanted.data)
    apart = {"layers.0.experts": bound(per_expert())}
    assert wanted.num_bytes < packed_bytes(apart, LAYOUT, torch.float32)
