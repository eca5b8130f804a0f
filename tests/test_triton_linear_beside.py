"""linear_lora in two launches, in Triton's interpreter: the bits of the one launch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from linear_cases import SITES, random_case
from moegraft.backends.triton.linear_beside import LinearBeside, fits_beside
from moegraft.backends.triton.linear_lora import linear_lora_group
from moegraft.backends.triton.stages import TritonStages
from moegraft.sites import linear_site
from moegraft.stages import LinearLater
from moegraft.testing import assert_bit_equal
from moegraft.types import TokenSlots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 17, 40])
def test_two_launches_are_right_and_have_the_bits_of_one(
    num_tokens: int, dtype: torch.dtype
) -> None:
    case = random_case(num_tokens, dtype, "cpu")
    slots = replace(case.slots, in_graph=True, cache={})
    assert fits_beside(case.tables, slots)
    case.check(lambda outs: LinearBeside(case.x, case.tables, slots).add_to(outs))
    one = [base.clone() for base in case.bases]
    two = [base.clone() for base in case.bases]
    linear_lora_group(case.x, case.tables, slots, one)
    LinearBeside(case.x, case.tables, slots).add_to(two)
    for mine, theirs in zip(two, one, strict=True):
        assert_bit_equal(mine, theirs, "two launches and one")


def test_one_linear_and_views_of_one_output() -> None:
    case = random_case(7, torch.float32, "cpu")
    slots = replace(case.slots, in_graph=True, cache={})
    wide = torch.cat(case.bases, 1)
    widths = [base.shape[1] for base in case.bases]
    LinearBeside(case.x, case.tables, slots).add_to(wide.split(widths, 1))
    case.check(
        lambda outs: [
            out.copy_(part) for out, part in zip(outs, wide.split(widths, 1), strict=True)
        ]
    )
    alone = case.bases[1].clone()
    LinearBeside(case.x, case.tables[1:2], slots).add_to([alone])
    assert_bit_equal(alone, wide.split(widths, 1)[1].contiguous(), "alone and in the group")


def test_outs_of_two_dtypes_and_bad_strides_go_the_plain_way() -> None:
    case = random_case(5, torch.float32, "cpu")
    slots = replace(case.slots, in_graph=True, cache={})
    outs = [case.bases[0].clone(), case.bases[1].double(), case.bases[2].clone()]
    LinearBeside(case.x, case.tables, slots).add_to([outs[0], outs[1].float(), outs[2]])
    assert not torch.equal(outs[0], case.bases[0])


def test_only_graphs_with_few_tokens_begin_early() -> None:
    case = random_case(4, torch.float32, "cpu")
    assert isinstance(
        TritonStages().linear_lora_begin(case.x, case.tables, case.slots), LinearLater
    )
    many = TokenSlots(torch.zeros(300, dtype=torch.int32), (0,), {}, True)
    assert not fits_beside(case.tables, many)
    sites = (*SITES, linear_site("a", 43, 8), linear_site("b", 43, 8))
    five = random_case(4, torch.float32, "cpu", sites=sites)
    assert not fits_beside(five.tables, replace(five.slots, in_graph=True))
