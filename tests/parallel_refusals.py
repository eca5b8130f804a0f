"""What sharded models are refused, run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import moegraft
from moegraft.hosts.transformers.agreement import HeldRows, agreed
from moegraft.testing import assert_close
from parallel_hosts import CONFIG, MODES, adapters_for, merged, sharded_model, whole_model
from tiny_grafts import prompts


def gradients_are_refused(rank: int, folder: Path, mode: str) -> None:
    """With gradients ranks would exchange rows, or run on DTensors."""
    graft = moegraft.attach(sharded_model(folder, mode))
    adapters = adapters_for(graft.spec)
    for name in ("down", "attention"):
        graft.load_tensors(name, adapters[name], CONFIG)
    inputs = prompts(2)
    for name in ("down", "attention"):
        try:
            with graft.rows(name, 2):
                graft.model(**inputs)
        except moegraft.MoegraftError as error:
            assert "torch.no_grad()" in str(error), error
        else:
            raise AssertionError(f"{name}: gradients with adapters")
    base = graft.model(**inputs).logits
    with torch.no_grad():
        assert_close(base.detach(), graft.model(**inputs).logits, torch.float32)


def refused_modes(rank: int, folder: Path) -> list[tuple[str, str]]:
    """Attach to models that are sharded in other ways; return each refusal."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from transformers.distributed import DistributedConfig

    found: list[tuple[str, str]] = []

    def refused(name: str, model: Any) -> None:
        def state() -> list[Any]:
            return [
                (m.__dict__.get("forward"), len(m._forward_pre_hooks), len(m._forward_hooks))
                for m in model.modules()
            ]

        before = state()
        try:
            moegraft.attach(model)
        except moegraft.UnsupportedError as error:
            found.append((name, str(error)))
        else:
            raise AssertionError(f"{name} was attached")
        assert state() == before, "a model that is refused is not touched"

    def load(**config: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(**config)
        )

    refused("all_to_all", load(**MODES["tp and ep"], ep_implementation="all_to_all"))
    refused("fsdp", load(fsdp_size=2))
    refused("pp", load(pp_size=2))
    model = sharded_model(folder, "tp")
    gate = model.model.layers[0].mlp.gate
    mesh = model.model.layers[0].self_attn.q_proj.weight.device_mesh
    whole = distribute_tensor(gate.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    gate.weight = torch.nn.Parameter(whole)
    refused("router", model)
    model = sharded_model(folder, "tp")
    q_proj = model.model.layers[0].self_attn.q_proj
    q_proj.forward = q_proj.__class__.forward.__get__(q_proj)
    refused("a foreign forward", model)
    plain = whole_model(folder)
    plain._tp_size = 2
    refused("plain slices", plain)
    assert isinstance(q_proj.weight, DTensor) and Replicate() not in q_proj.weight.placements
    return found


def no_static_decoding(rank: int, folder: Path) -> None:
    """Graphs and static caches say why not."""
    graft = moegraft.attach(sharded_model(folder, "tp and ep"))
    try:
        graft.decoder(2, 16)
    except moegraft.UnsupportedError as error:
        assert "sharded over ranks" in str(error)
    else:
        raise AssertionError("a decoder over a sharded model")


def vectors_are_refused(rank: int, folder: Path, mode: str) -> None:
    """DoRA and biases of lora_B are not sliced, so they are refused by name."""
    graft = moegraft.attach(sharded_model(folder, mode))
    tensors = adapters_for(graft.spec)["attention"]
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    extra = {
        f"{name}.lora_B.bias": torch.ones(24),
        f"{name}.lora_magnitude_vector": torch.ones(24),
    }
    for key, value in extra.items():
        try:
            graft.load_tensors("vectors", {**tensors, key: value}, CONFIG)
        except moegraft.AdapterError as error:
            assert key in str(error), error
        else:
            raise AssertionError(f"{key} was taken, and would count once per rank")
    assert not graft.adapters


def ranks_that_differ(rank: int, folder: Path) -> list[str]:
    """Batches that only one rank could run; returns what each rank is told."""
    graft = moegraft.attach(sharded_model(folder, "tp and ep"), max_adapters=2)
    adapters = adapters_for(graft.spec)
    for name in ("down", "attention"):
        graft.load_tensors(name, adapters[name], CONFIG)
    if rank == 1:
        graft.load_tensors("half", adapters["half"], CONFIG)
    inputs = prompts(2)
    found = []

    def refused(rows: Any) -> None:
        try:
            graft.forward(**inputs, adapters=rows)
        except moegraft.AdapterError as error:
            found.append(str(error))
        else:
            raise AssertionError(f"{rows} ran on rank {rank}")

    refused(["half", None])  # rank 0 has no such adapter
    refused(["down", "attention"] if rank else ["attention", "down"])
    refused(["down"] if rank == 0 else ["down", None])  # one entry too few on rank 0
    # Nothing of it stays: the same batch runs, whatever slots the ranks gave out meanwhile.
    logits = graft.forward(**inputs, adapters=["attention", "down"]).logits
    whole = whole_model(folder)
    for row, name in enumerate(("attention", "down")):
        one = {key: value[row : row + 1] for key, value in inputs.items()}
        mask = one["attention_mask"][0].bool()
        with torch.no_grad():
            expected = merged(whole, graft.spec, adapters[name])(**one).logits
        assert_close(logits[row : row + 1][:, mask], expected[:, mask], torch.float32)
    return found


def a_rank_that_fails(rank: int) -> str:
    """One rank finds no memory for its adapters; returns what each rank is told."""

    @contextmanager
    def hold() -> Iterator[HeldRows]:
        if rank == 1:
            torch.zeros(2**60)
        yield HeldRows(["a"], {"a": 0})

    try:
        with agreed(hold()):
            raise AssertionError(f"the batch ran on rank {rank}")
    except (RuntimeError, moegraft.MoegraftError) as error:
        return f"{type(error).__name__}: {error}"
