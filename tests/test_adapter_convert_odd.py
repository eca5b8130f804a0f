"""Conversions of odd adapters: several dtypes, layers of zeros; a disk that is full."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

import tiny
from moegraft.adapters import BoundAdapter, bind, check_bound, make_source, read_adapter
from moegraft.adapters.convert import Converted, convert
from moegraft.adapters.refit import refit
from moegraft.adapters.writers import Pair
from moegraft.errors import AdapterError
from moegraft.testing import relative_error

MODEL = "qwen3_moe"


def bound_again(found: Converted) -> BoundAdapter:
    """What was written, read again and bound in full."""
    spec = tiny.spec_of(MODEL)
    bound = bind(make_source(found.tensors, found.config), spec)
    check_bound(bound.report, spec)
    return bound


def test_halves_of_several_dtypes_keep_every_value_side_by_side() -> None:
    tensors = dict(tiny.tensors_of("per_expert/qwen3_moe/plain"))
    for key, tensor in tensors.items():
        up = "up_proj" in key
        tensors[key] = (1e6 * tensor).bfloat16() if up and "lora_B" in key else tensor.half()
    source = make_source(tensors, tiny.config_of("per_expert/qwen3_moe/plain"))
    spec = tiny.spec_of(MODEL)
    found = convert(source, spec, "peft")
    assert found.exact
    whole, fused = (tiny.all_deltas(b, spec) for b in (bind(source, spec), bound_again(found)))
    for key, delta in whole.items():
        assert relative_error(fused[key], delta) <= 1e-6, key


@pytest.mark.parametrize("to", ["peft", "per-expert", "3d"])
@pytest.mark.parametrize("rank", [None, 2])
def test_a_layer_of_zeros_beside_a_trained_one_is_converted(to: str, rank: int | None) -> None:
    tensors = {
        key: 0 * tensor if "layers.1." in key else tensor
        for key, tensor in tiny.tensors_of(tiny.EXPERTS).items()
    }
    source = make_source(tensors, tiny.config_of(tiny.EXPERTS))
    spec = tiny.spec_of(MODEL)
    found = convert(source, spec, to, rank=rank)
    kept = bound_again(found).factors
    assert ("model.layers.1.mlp.experts" in kept) == (to != "per-expert")


def test_a_file_that_can_not_be_written_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    found = convert(read_adapter(tiny.folder(tiny.EXPERTS)), tiny.spec_of(MODEL), "3d")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(AdapterError, match="can't be written: "):
            found.save(tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_a", "num_b"), [(1, 4), (4, 1), (4, 4), (1, 1)])
def test_factors_of_a_rank_over_their_matrixs_are_refitted_exactly(num_a: int, num_b: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lora_a = torch.randn(num_a, 6, 3, generator=generator)
    lora_b = torch.randn(num_b, 5, 6, generator=generator)
    found, error = refit(Pair("gate", lora_a, lora_b, 1.0), 5)
    assert found.lora_A.shape[0] == num_a and found.lora_B.shape[:2] == (num_b, 5)
    assert found.lora_A.shape[1] == found.lora_B.shape[2] <= 5
    assert error <= 1e-6
    assert relative_error(found.lora_B @ found.lora_A, lora_b @ lora_a) <= 1e-6
