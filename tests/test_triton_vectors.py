"""Vectors of linears in Triton's interpreter: rank-1 factors of a linear whose input is 1."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from linear_cases import random_case
from moegraft.backends.triton.linear_lora import linear_lora_group
from moegraft.sites import linear_site
from moegraft.testing import assert_close

VECTORS = (linear_site("q:dora", 1, 67),)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_linear_with_one_input_adds_a_vector_per_row(num_tokens: int, dtype: torch.dtype) -> None:
    case = random_case(num_tokens, dtype, "cpu", sites=VECTORS)
    case.check(lambda outs: linear_lora_group(case.x, case.tables, case.slots, outs))


def test_vectors_of_fp16_factors_go_to_an_fp32_result() -> None:
    case = random_case(7, torch.float16, "cpu", sites=VECTORS)
    out = torch.zeros(7, 67)
    linear_lora_group(case.x, case.tables, case.slots, [out])
    assert_close(out.half(), case.deltas[0], torch.float16)
