"""Files of very many tensors: done for all at once, everything is as one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moegraft.adapters import ModelSpec, bind, make_source
from moegraft.adapters.file_policy import DEFAULT_POLICY
from moegraft.adapters.keys import parse_key, parse_keys
from moegraft.adapters.tensor_file import reading
from moegraft.sites import expert_site

PARTS = ["base_model.model.", "base_model.", "model.layers.0.", "experts.3.gate_proj.", "lora_A."]
PARTS += ["lora_B", "lora_magnitude_vector", "default.", "trainable_tokens_delta.", "weight", "x"]
ENDS = ["", ".lora_A.weight", ".lora_B.weight", ".lora_A.default.weight", ".weight", ".bias"]
NAMES = st.builds(
    lambda parts, end: "".join(parts) + end,
    st.lists(st.sampled_from(PARTS), max_size=5),
    st.sampled_from(ENDS),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(NAMES, unique=True, max_size=6))
def test_names_taken_apart_together_are_as_one_by_one(names: list[str]) -> None:
    assert parse_keys(names) == {name: parse_key(name) for name in names}
    usual = [name for name in names if name.endswith(ENDS[1])]
    assert parse_keys(usual) == {name: parse_key(name) for name in usual}


def one_by_one(count: int) -> dict[str, torch.Tensor]:
    """Single experts: gate and up of one kind, down of another."""
    return {
        f"experts.{i}.{name}": torch.randn(4, 6 if name == "down" else 10).bfloat16()
        for i in range(count)
        for name in ("gate", "up", "down")
    }


def odd(count: int) -> dict[str, torch.Tensor]:
    """The same, but for one expert that lacks a tensor in the middle."""
    tensors = one_by_one(count)
    del tensors[f"experts.{count // 2}.up"]
    return tensors


def several_dtypes(count: int) -> dict[str, torch.Tensor]:
    tensors = one_by_one(count)
    return {n: t.float() if i % 7 == 0 else t for i, (n, t) in enumerate(tensors.items())}


def empty_ones(count: int) -> dict[str, torch.Tensor]:
    return {f"empty.{i}": torch.zeros(0, 8) for i in range(count)} | one_by_one(3)


FILES = {f.__name__: f for f in (one_by_one, odd, several_dtypes, empty_ones)}


@pytest.mark.parametrize("count", [1, 2, 17, 40, 200])
@pytest.mark.parametrize("kind", FILES)
def test_views_are_the_tensors_of_the_file(tmp_path: Path, kind: str, count: int) -> None:
    path = tmp_path / "file.safetensors"
    save_file(FILES[kind](count), path)
    wanted = load_file(path)
    with reading(path, DEFAULT_POLICY) as file:
        pass
    assert set(file.tensors) == set(wanted)
    for name, tensor in file.tensors.items():
        assert tensor.is_contiguous() and tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), name
        assert not tensor.numel() or (
            tensor.untyped_storage().data_ptr() == file.memory.untyped_storage().data_ptr()
        )
    assert sum(run.nbytes for run in file.runs) == file.memory.nbytes


def file_of(path: Path, dtypes: list[str], backwards: bool) -> None:
    """Tensors t0, t1, .. of six values each, which are 6 i, 6 i + 1, .. in their dtype."""
    order = list(range(len(dtypes)))
    entries, data = {}, b""
    for i in reversed(order) if backwards else order:
        dtype = torch.bfloat16 if dtypes[i] == "BF16" else torch.float32
        values = torch.arange(6 * i, 6 * i + 6).to(dtype)
        if dtypes[i] == "BF16" and i == 0:
            values = values[:5]
        raw = values.view(torch.uint8).numpy().tobytes()
        span = f"[{len(data)},{len(data) + len(raw)}]"
        entries[i] = (
            f'"t{i}":{{"dtype":"{dtypes[i]}","shape":[{len(values)}],"data_offsets":{span}}}'
        )
        data += raw
    header = ("{" + ",".join(entries[i] for i in order) + "}").encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("dtypes", [["BF16"] * 40, ["BF16", *["F32"] * 40]])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_of_the_data_and_its_alignment_are_any(
    tmp_path: Path, dtypes: list[str], backwards: bool
) -> None:
    """Behind ten bytes of bfloat16 no float32 begins at a multiple of its size."""
    path = tmp_path / "file.safetensors"
    file_of(path, dtypes, backwards)
    with reading(path, DEFAULT_POLICY) as file:
        pass
    assert list(file.tensors) == [f"t{i}" for i in range(len(dtypes))]
    for i, (name, tensor) in enumerate(file.tensors.items()):
        wanted = torch.arange(6 * i, 6 * i + 6).to(tensor.dtype)
        assert torch.equal(tensor, wanted[: len(tensor)]) and len(tensor) >= 5, name


def test_a_pair_that_is_swapped_is_refused_though_its_shapes_were_seen_before() -> None:
    """Experts 0 to 2 are right; of expert 3 the B comes first and has the shape of an A."""
    site = expert_site("model.layers.0.mlp.experts", 4, 8, 8)
    path = "model.layers.0.mlp.experts"
    tensors = {
        f"{path}.{e}.up_proj.lora_{leaf}.weight": torch.randn(4, 8) if leaf == "A" else b
        for e in range(3)
        for b in [torch.randn(8, 4)]
        for leaf in "AB"
    }
    tensors[f"{path}.3.up_proj.lora_B.weight"] = torch.randn(4, 8)
    tensors[f"{path}.3.up_proj.lora_A.weight"] = torch.randn(8, 4)
    found = bind(make_source(tensors, {"r": 4, "lora_alpha": 4}), ModelSpec((site,)))
    assert set(found.report.refused) == {n for n in tensors if ".3." in n}
    assert found.report.bound == 6


@pytest.mark.parametrize("pattern", [{}, {r"experts\.2\.up_proj": 12}])
def test_each_expert_has_the_scale_of_its_own_name(pattern: dict[str, int]) -> None:
    site = expert_site("model.layers.0.mlp.experts", 4, 8, 8)
    tensors = {
        f"model.layers.0.mlp.experts.{e}.up_proj.lora_{leaf}.weight": torch.randn(
            *((4, 8) if leaf == "A" else (8, 4))
        )
        for e in range(4)
        for leaf in "AB"
    }
    config = {"r": 4, "lora_alpha": 4, "alpha_pattern": pattern}
    factor = bind(make_source(tensors, config), ModelSpec((site,))).factors[site.name]
    up = factor.projections["up"]
    for e in range(4):
        scale = 3.0 if pattern and e == 2 else 1.0
        a, b = (tensors[f"{site.name}.{e}.up_proj.lora_{leaf}.weight"] for leaf in "AB")
        entry = factor.entry(e)
        ours = up.scale * up.lora_B[entry].float() @ up.lora_A[entry].float()
        torch.testing.assert_close(ours, scale * b @ a)
