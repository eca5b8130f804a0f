"""A step's metadata, made on the host, against vLLM's own; on the CPU the GPU's class too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from experts_cases import DEVICE
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu

from moegraft.hosts.vllm.punica import PunicaWrapperGPU, slots_of

SLOTS = (5, None, 2**40, 9)
MAX_ROWS, VOCABULARY = 64, 512


def make_wrapper(monkeypatch: pytest.MonkeyPatch) -> PunicaWrapperGPU:
    # vLLM leaves the name out where it finds no Triton; these are tensors and nothing else.
    monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
    lora = LoRAConfig(max_lora_rank=8, max_loras=len(SLOTS))
    return PunicaWrapperGPU(MAX_ROWS, 16, device=torch.device(DEVICE), lora_config=lora)


def update(wrapper: PunicaWrapperGPU, mapping: LoRAMapping) -> dict[Any, torch.Tensor]:
    wrapper.update_metadata(mapping, list(SLOTS), len(SLOTS) + 1, VOCABULARY)
    return wrapper._state()


def put_back(wrapper: PunicaWrapperGPU, state: dict[Any, torch.Tensor]) -> None:
    holders = (wrapper, wrapper.token_mapping_meta, wrapper.prompt_mapping_meta)
    for i, holder in enumerate(holders):
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                value.copy_(state[i, name])


def test_metadata_is_vllms_for_random_steps_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapper = make_wrapper(monkeypatch)
    assert wrapper._moegraft_on_host
    generator = np.random.default_rng(3)
    for step in range(40):
        ids = generator.choice([0, 5, 9, 2**40], int(generator.integers(1, 9)))
        if step % 5 == 0:
            ids[:] = 0  # no adapter at all
        rows = tuple(ids.repeat(generator.integers(1, 8, len(ids))))
        mapping = LoRAMapping(rows, tuple(ids), is_prefill=bool(step % 2))
        start = wrapper._state()
        found = update(wrapper, mapping)
        put_back(wrapper, start)
        wrapper._moegraft_on_host = False
        wanted = update(wrapper, mapping)
        wrapper._moegraft_on_host = True
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


def test_an_adapter_without_a_slot_is_left_to_vllm_to_complain_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert slots_of((0, 5, 7), SLOTS) is None
    with pytest.raises(KeyError):
        update(make_wrapper(monkeypatch), LoRAMapping((0, 7), (7,), is_prefill=True))


def test_a_version_that_keeps_something_else_takes_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = punica_gpu.PunicaWrapperGPU._update_base_metadata
    rows_seen = []

    def other(self: Any, mapping: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, mapping, *args, **kwargs)
        self._sampler_indices[0] = 77
        rows_seen.append(len(mapping.index_mapping))

    monkeypatch.setattr(punica_gpu.PunicaWrapperGPU, "_update_base_metadata", other)
    wrapper = make_wrapper(monkeypatch)
    assert not wrapper._moegraft_on_host
    update(wrapper, LoRAMapping((5, 5), (5,), is_prefill=True))
    assert rows_seen == [3, 2] and int(wrapper._sampler_indices[0]) == 77
    assert wrapper.token_mapping_meta.token_lora_mapping[:3].tolist() == [0, 0, -1]
