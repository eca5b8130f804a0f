"""The decoder: greedy decoding of a batch without generate; its attention over grouped heads."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import moegraft
from moegraft.errors import MoegraftError
from moegraft.hosts.transformers import Graft
from moegraft.hosts.transformers.attention import (
    IMPLEMENTATION,
    grouped_attention,
    grouped_sdpa,
    may_group,
)
from moegraft.hosts.transformers.limits import cache_bytes
from moegraft.testing import assert_close
from tiny_grafts import ROWS, generate, greedy, prompts, static_graft

QWEN = "peft/0.21.2/qwen3_moe/"
NAME = "qwen3_moe"


@pytest.fixture
def graft() -> Iterator[Graft]:
    graft = static_graft()
    yield graft
    graft.detach()


def test_a_decoder_gives_the_tokens_of_plain_forwards() -> None:
    graft, rows = static_graft(), ROWS[NAME]
    inputs = prompts(len(rows))
    expected = greedy(graft, inputs, rows, 6)
    decoder = graft.decoder(len(rows), 13)
    for _ in range(2):
        first = decoder.prefill(inputs["input_ids"], rows, inputs["attention_mask"])
        assert torch.equal(first, expected[:, 7])
        assert torch.equal(decoder.step(), expected[:, 8])
        assert torch.equal(decoder.run(4), expected)
        assert torch.equal(decoder.tokens, expected)
        with pytest.raises(MoegraftError, match="All 13 tokens per row are used"):
            decoder.step()
    base = decoder.prefill(inputs["input_ids"], None, inputs["attention_mask"])
    alone = greedy(graft, inputs, None, 6)
    assert torch.equal(base, alone[:, 7]) and torch.equal(decoder.run(5), alone)


def test_a_decoder_goes_on_with_the_tokens_it_is_given(graft: Graft) -> None:
    inputs, rows = prompts(2), [f"{QWEN}experts", None]
    decoder = graft.decoder(2, 16)
    decoder.prefill(inputs["input_ids"], rows, inputs["attention_mask"])
    forced = torch.tensor([[11, 12, 13], [21, 22, 23]])
    chosen = [decoder.step(forced[:, i]).clone() for i in range(3)]
    whole = torch.cat([inputs["input_ids"], forced], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(forced)], 1)
    logits = graft.forward(input_ids=whole, attention_mask=mask, adapters=rows).logits
    assert torch.equal(torch.stack(chosen, 1), logits[:, -3:].argmax(-1))
    assert torch.equal(decoder.tokens[:, :-1], whole)


def test_a_decoders_adapters_stay_until_its_batch_ends() -> None:
    graft = static_graft(max_adapters=1)
    inputs = prompts(1)
    decoder = graft.decoder(1, 16)
    with pytest.raises(MoegraftError, match="call prefill"):
        decoder.step()
    decoder.prefill(inputs["input_ids"], f"{QWEN}experts")
    graft.unload(f"{QWEN}experts")
    with pytest.raises(moegraft.AdapterError, match="in use by running batches"):
        generate(graft, inputs, adapters=f"{QWEN}router")
    decoder.step()
    decoder.close()
    generate(graft, inputs, adapters=f"{QWEN}router")
    with pytest.raises(moegraft.AdapterError, match="no adapter"):
        decoder.prefill(inputs["input_ids"], f"{QWEN}experts")


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["nobody", None], "no adapter 'nobody'"),
        ([f"{QWEN}experts", f"{QWEN}router"], "2 different adapters .* has 1 slots"),
        ([None], "2 rows but 1 adapters"),
    ],
)
def test_a_batch_goes_on_when_the_next_one_is_refused(adapters: list[Any], message: str) -> None:
    graft, inputs = static_graft(max_adapters=1), prompts(2)
    rows = [f"{QWEN}experts", None]
    expected = greedy(graft, inputs, rows, 5)
    decoder = graft.decoder(2, 16)
    decoder.prefill(inputs["input_ids"], rows, inputs["attention_mask"])
    decoder.run(2)
    with pytest.raises(moegraft.AdapterError, match=message):
        decoder.prefill(inputs["input_ids"], adapters, inputs["attention_mask"])
    assert torch.equal(decoder.run(2), expected)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (2, 16), (2, 0)])
def test_prompts_that_do_not_fit_a_decoder_are_refused(
    graft: Graft, shape: tuple[int, int]
) -> None:
    decoder = graft.decoder(2, 16)
    with pytest.raises(MoegraftError, match=r"takes 2 rows of 1 to 15 tokens"):
        decoder.prefill(torch.ones(shape, dtype=torch.long))
    with pytest.raises(MoegraftError, match="at least one row and two tokens"):
        graft.decoder(0, 16)


def test_detach_ends_decoders(graft: Graft) -> None:
    decoder = graft.decoder(1, 16)
    decoder.prefill(torch.ones(1, 4, dtype=torch.long))
    graft.detach()
    with pytest.raises(MoegraftError, match="call prefill"):
        decoder.step()
    with pytest.raises(MoegraftError, match="detached"):
        decoder.prefill(torch.ones(1, 4, dtype=torch.long))


class Reads(TorchDispatchMode):
    """Records where the host reads a value of the device, or copies one to it."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.READS:
            lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()]
            # The CPU's backend may; a GPU's has tests of its own.
            if not any("backends/cpu" in line for line in lines):
                self.found.append(" <- ".join(reversed(lines[-8:-1])))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_a_step_reads_nothing_of_the_device(name: str, attention: str) -> None:
    graft, rows = static_graft(name, fuse_linears=True), ROWS[name]
    graft.model.set_attn_implementation(attention)
    inputs = prompts(len(rows))
    decoder = graft.decoder(len(rows), 16)
    decoder.prefill(inputs["input_ids"], rows, inputs["attention_mask"])
    decoder.step()
    with Reads() as reads:
        decoder.step()
    assert not reads.found
    generate(graft, inputs, adapters=rows, graphs=True)
    assert graft._graphed is not None
    [kept] = graft._graphed._free
    assert kept.runner is not None
    with Reads() as reads, torch.no_grad():
        kept.runner.execute()
    assert not reads.found
    with Reads() as reads:
        assert decoder.tokens.sum().item() > 0
    assert len(reads.found) == 1, "it finds reads"
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.cache.layers)
    assert cache_bytes(graft.model, len(rows), kept.max_length) == size


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_of_one_token_over_grouped_heads_equals_transformers(
    heads: int, masked: bool
) -> None:
    graft = static_graft()
    module = graft.model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(3, heads, 1, 8, generator=generator)
    key, value = (torch.randn(3, 2, 9, 8, generator=generator) for _ in range(2))
    mask = torch.rand(3, 1, 1, 9, generator=generator) > 0.3 if masked else None
    module.num_key_value_groups = heads // 2
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=0.3)[0]
    found, weights = grouped_sdpa(module, query, key, value, mask, scaling=0.3)
    assert weights is None and found.shape == plain.shape
    assert_close(found, plain, torch.float32)


def test_grouped_attention_is_switched_on_for_a_step_only_and_for_plain_sdpa_only() -> None:
    model = static_graft().model
    assert not may_group(model)
    model.set_attn_implementation("sdpa")
    assert may_group(model)
    with grouped_attention(model), grouped_attention(model):
        assert model.config._attn_implementation == IMPLEMENTATION
    assert model.config._attn_implementation == "sdpa"
