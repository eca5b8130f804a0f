"""linear_lora beside the host's products, in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from linear_cases import random_case
from moegraft.backends.triton.linear_beside import LinearBeside
from moegraft.backends.triton.stages import STAGES
from moegraft.sites import linear_site
from moegraft.testing import assert_bit_equal
from moegraft.types import TokenSlots

pytestmark = pytest.mark.gpu

SITES = (linear_site("q", 512, 1024), linear_site("k", 512, 128), linear_site("v", 512, 130))


@pytest.mark.parametrize("num_tokens", [1, 16, 64])
def test_replays_with_other_slots_have_the_bits_of_eager_calls(num_tokens: int) -> None:
    case = random_case(num_tokens, torch.bfloat16, "cuda", sites=SITES)
    x = case.x.nan_to_num()
    weights = [torch.randn(base.shape[1], 512, device="cuda").bfloat16() for base in case.bases]
    static = case.slots.slots.clone()
    outs: list[torch.Tensor] = []

    def step(slots: TokenSlots) -> list[torch.Tensor]:
        found = []
        for _ in range(3):  # forks follow one another
            begun = STAGES.linear_lora_begin(x, case.tables, slots)
            assert isinstance(begun, LinearBeside)
            products = [x @ weight.T for weight in weights]
            begun.add_to(products)
            found = products
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(TokenSlots.captured(static))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = TokenSlots.captured(static)
        outs = step(slots)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        now = torch.randint(-1, 8, (num_tokens,), generator=generator, dtype=torch.int32)
        static.copy_(now)
        graph.replay()
        expected = [x @ weight.T for weight in weights]
        STAGES.linear_lora_group(x, case.tables, TokenSlots.of(now, "cuda"), expected)
        for mine, theirs in zip(outs, expected, strict=True):
            assert_bit_equal(mine, theirs, f"slots {now.tolist()}")
