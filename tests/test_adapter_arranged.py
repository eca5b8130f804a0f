"""Experts' tensors come into memory in the order of the arena: the values are those of the file."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moegraft.adapters import ModelSpec, bind, check_bound, read_adapter, tensor_file
from moegraft.adapters.checksum import checksum_of
from moegraft.adapters.file_policy import DEFAULT_POLICY
from moegraft.adapters.tensor_file import TensorFile, reading
from moegraft.errors import AdapterError
from moegraft.factors import TableLayout
from moegraft.packing import pack_adapter
from moegraft.sites import expert_site, linear_site

E, H, WIDTH, R = 13, 32, 24, 8  # experts 0, 1, 10, 11, 12, 2, ..
LAYERS = 3
SITES = tuple(
    site
    for i in range(LAYERS)
    for site in (
        linear_site(f"model.layers.{i}.self_attn.q_proj", H, H),
        expert_site(f"model.layers.{i}.mlp.experts", E, H, WIDTH),
    )
)
LAYOUT, SPEC = TableLayout.of(SITES), ModelSpec(SITES)
SIZES = {"gate": (H, WIDTH), "up": (H, WIDTH), "down": (WIDTH, H)}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are read by threads, too, in chunks that end within tensors."""
    monkeypatch.setattr(tensor_file, "_CHUNK_BYTES", 5000)


def adapter(mixtral: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    tensors = {}
    for i in range(LAYERS):
        head = f"base_model.model.model.layers.{i}"
        tensors[f"{head}.self_attn.q_proj.lora_A.weight"] = torch.randn(R, H, dtype=dtype)
        tensors[f"{head}.self_attn.q_proj.lora_B.weight"] = torch.randn(H, R, dtype=dtype)
        for e in range(E):
            for name, (num_in, num_out) in zip(names, SIZES.values(), strict=True):
                path = f"{head}.mlp.experts.{e}.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(R, num_in, dtype=dtype)
                tensors[f"{path}.lora_B.weight"] = torch.randn(num_out, R, dtype=dtype)
    return tensors


def save(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"r": {R}, "lora_alpha": {R}}}')
    return folder / "adapter_model.safetensors"


def read(path: Path) -> TensorFile:
    with reading(path, DEFAULT_POLICY) as file:
        pass
    return file


def offsets(file: TensorFile, names: Sequence[str]) -> list[int]:
    return [file.tensors[name].data_ptr() - file.memory.data_ptr() for name in names]


def assert_is_the_file(file: TensorFile, path: Path) -> None:
    wanted = load_file(path)
    assert set(file.tensors) == set(wanted)
    spans = []
    for name, tensor in file.tensors.items():
        assert tensor.is_contiguous() and tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), name
        begin = tensor.data_ptr() - file.memory.data_ptr()
        spans.append((begin, begin + tensor.nbytes))
    spans = sorted(span for span in spans if span[0] < span[1])
    assert spans[0][0] == 0 and spans[-1][1] == file.memory.nbytes
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    of_runs = sum(run.double().square().sum() for run in file.runs)
    torch.testing.assert_close(of_runs, sum(t.double().square().sum() for t in wanted.values()))


@pytest.mark.parametrize("mixtral", [False, True])
def test_each_kind_of_a_layer_lies_in_the_order_of_experts(tmp_path: Path, mixtral: bool) -> None:
    path = save(adapter(mixtral), tmp_path)
    file = read(path)
    assert_is_the_file(file, path)
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for i in range(LAYERS):
        head = f"base_model.model.model.layers.{i}.mlp.experts"
        in_order = [
            f"{head}.{e}.{name}.lora_{leaf}.weight"
            for name in names
            for leaf in "AB"
            for e in range(E)
        ]
        assert offsets(file, in_order) == sorted(offsets(file, in_order))


@pytest.mark.parametrize("in_order", [True, False], ids=["arranged", "as in the file"])
def test_what_is_packed_inside_of_the_memory_is_what_is_packed_elsewhere(
    tmp_path: Path, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(adapter(), tmp_path)
    if not in_order:
        monkeypatch.setattr(tensor_file, "arranged", lambda header: header.begins)
    source, again = read_adapter(tmp_path), read_adapter(tmp_path)
    found = bind(source, SPEC)
    check_bound(found.report, SPEC)
    factors = [found.factors[site.name] for site in SITES if site.kind == "experts"]
    assert all((f.expert_map is None) == in_order for f in factors)
    inside = pack_adapter(found.factors, LAYOUT, torch.bfloat16, memory=source.memory)
    assert source.memory is not None and inside.data.data_ptr() == source.memory.data_ptr()
    apart = pack_adapter(bind(again, SPEC).factors, LAYOUT, torch.bfloat16)
    for site, (begin, end) in apart.spans.items():
        own_begin, own_end = inside.spans[site]
        assert torch.equal(inside.data[own_begin:own_end], apart.data[begin:end])
    assert checksum_of(inside, LAYOUT) == checksum_of(apart, LAYOUT)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["lacks some", "dtypes", "shapes", "odd names"]))
def test_irregular_files_are_read_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, seed: int, what: str
) -> None:
    generator = random.Random(seed)
    tensors = adapter()
    for name in generator.sample(sorted(tensors), generator.randint(1, 9)):
        tensor = tensors.pop(name)
        if what == "dtypes":
            tensors[name] = tensor.float()
        elif what == "shapes":
            shape = generator.choice([(2, 3), (0, 4), (5,), ()])
            tensors[name] = torch.randn(shape).bfloat16()
        elif what == "odd names":
            number = generator.choice(["01", "-1", "1e3", "\u0661", "9" * 12, "x.experts.3", ""])
            tensors[name.replace("experts.1", f"experts.{number}")] = tensor
    path = save(tensors, tmp_path_factory.mktemp("adapter"))
    if sum(t.nbytes for t in tensors.values()) % 4 == 0:
        assert_is_the_file(read(path), path)
    else:  # copies of tensors that are not aligned lie elsewhere
        file, wanted = read(path), load_file(path)
        assert all(torch.equal(file.tensors[name], t) for name, t in wanted.items())


def test_reads_that_bring_less_than_was_asked_for_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(adapter(), tmp_path)
    real, counts = os.preadv, [1, 383, 384, 385, 1000, 4096]
    lengths = random.Random(0)

    def preadv(fd: int, parts: list[memoryview], offset: int) -> int:
        assert len(parts) <= tensor_file._MAX_PARTS
        left = lengths.choice(counts)
        some = []
        for part in parts:
            some.append(part[:left])
            left -= len(some[-1])
        return real(fd, some, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(tensor_file, "_MAX_PARTS", 3)
    assert_is_the_file(read(path), path)


def test_a_file_that_ends_early_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(adapter(), tmp_path)
    real, size = os.preadv, path.stat().st_size

    def preadv(fd: int, parts: list[memoryview], offset: int) -> int:
        return 0 if offset > size - 9000 else real(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(AdapterError, match=r"it ended after [\d,]+ of [\d,]+ bytes of tensors"):
        read(path)


def test_a_value_that_is_no_number_is_found_by_its_name(tmp_path: Path) -> None:
    tensors = adapter()
    name = "base_model.model.model.layers.1.mlp.experts.12.up_proj.lora_B.weight"
    tensors[name][3, 5] = torch.inf
    save(tensors, tmp_path)
    with pytest.raises(AdapterError, match=f"{name} holds 1 NaN or infinite values"):
        read_adapter(tmp_path)


def test_an_empty_tensor_that_begins_where_another_does_moves_nothing(tmp_path: Path) -> None:
    """The experts' first tensor is empty and lies before one that is not theirs."""
    heads = [f"layers.0.mlp.experts.{e}" for e in range(E)]
    tensors = {f"{h}.{side}": torch.randn(R, H) for h in heads for side in ("a", "b")}
    foreign = torch.randn(R, H)
    places, data = {"foreign": (0, foreign)}, [foreign]
    end = foreign.nbytes
    for head in heads:
        places[f"{head}.aux"] = (0 if head == heads[0] else end, torch.empty(0, 4))
        for side in ("a", "b"):
            tensor = tensors[f"{head}.{side}"]
            places[f"{head}.{side}"] = (end, tensor)
            data.append(tensor)
            end += tensor.nbytes
    header = json.dumps(
        {
            name: {
                "dtype": "F32",
                "shape": list(tensor.shape),
                "data_offsets": [begin, begin + tensor.nbytes],
            }
            for name, (begin, tensor) in places.items()
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "adapter_model.safetensors"
    body = b"".join(tensor.numpy().tobytes() for tensor in data)
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    found = read(path).tensors
    for name, (_, tensor) in places.items():
        assert torch.equal(found[name], tensor), name
