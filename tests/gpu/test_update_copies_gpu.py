"""The launches that copy an update on a GPU, where the compiler's hints count, beside the host."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from update_kinds import FORMS, ODD_SIZES, experts_of, experts_plan, shifted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_odd_ranks_counts_and_offsets_are_copied_to_the_last_value(
    form: str, given: torch.dtype, dtype: torch.dtype
) -> None:
    for rank, num_in, num_out in ODD_SIZES:
        tensors = experts_of(rank, num_in, num_out, given, form)
        plan = experts_plan(tensors, num_in, num_out, dtype)
        assert plan.copies is not None
        wanted = torch.full((plan.pack.elements,), torch.nan, dtype=dtype)
        plan.fill([tensors[name] for name in plan.kinds.names], wanted)
        for offset in (0, 1, 2, 4):
            views = shifted(tensors, offset, "cuda")
            around = torch.full((len(wanted) + 256,), 7, dtype=dtype, device="cuda")
            case = f"rank {rank}, {num_in} -> {num_out}, offset {offset}"
            in_order = [views[name] for name in plan.kinds.names]
            assert plan.copies.run(in_order, around[128:-128]), case
            assert torch.equal(around[128:-128].cpu(), wanted), case
            assert bool((around[:128] == 7).all() and (around[-128:] == 7).all()), case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_one_bad_value_is_seen_wherever_it_is(given: torch.dtype, dtype: torch.dtype) -> None:
    tensors = experts_of(16, 300, 264, given, "per projection")
    plan = experts_plan(tensors, 300, 264, dtype)
    assert plan.copies is not None
    views = [tensors[name].cuda() for name in plan.kinds.names]
    data = torch.empty(plan.pack.elements, dtype=dtype, device="cuda")
    assert plan.copies.run(views, data)
    for view in views:
        flat = view.view(-1)
        for place in (0, 1, len(flat) // 2 + 7, len(flat) - 1):
            old = flat[place].clone()
            for value in (torch.nan, torch.inf, -torch.inf):
                flat[place] = value
                assert not plan.copies.run(views, data), (place, value)
            flat[place] = old
    assert plan.copies.run(views, data)
