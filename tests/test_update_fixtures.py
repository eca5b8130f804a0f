"""Plans for what real programs wrote: they pack, bit for bit, what a full reading packs."""

from __future__ import annotations

import pytest
import torch

import tiny
from moegraft.adapters import AdapterSource, BoundAdapter, ReadOptions, bind, check_bound
from moegraft.adapters.read import make_source
from moegraft.adapters.update_plan import TensorKinds, UpdatePlan, make_plan
from moegraft.factors import TableLayout
from moegraft.packing import pack_adapter


def plan_for(case: str) -> tuple[UpdatePlan | None, TableLayout, BoundAdapter]:
    spec = tiny.spec_of(tiny.model_of(case))
    layout = TableLayout.of(spec.table_sites)

    def bound(source: AdapterSource, options: ReadOptions | None) -> BoundAdapter:
        found = bind(source, spec, options)
        check_bound(found.report, spec)
        return found

    tensors, config = tiny.tensors_of(case), tiny.config_of(case)
    kinds = TensorKinds.of(tensors)
    assert kinds is not None
    plan = make_plan(kinds, config, None, bound, layout, torch.float32)
    return plan, layout, bound(make_source(tensors, config), None)


@pytest.mark.parametrize("case", tiny.SERVED_CASES)
def test_a_plan_packs_what_a_reading_packs(case: str) -> None:
    plan, layout, bound = plan_for(case)
    assert plan is not None, "there is no plan for it"
    data = torch.full((plan.pack.elements,), torch.nan)
    plan.fill(list(tiny.tensors_of(case).values()), data)
    if not plan.is_like(bound.report):
        assert any(
            p.shared_a or p.shared_b for s in bound.report.sites for p in s.projections.values()
        ), "only equal copies make a difference"
        return
    wanted = pack_adapter(bound.factors, layout, torch.float32)
    assert torch.equal(data, wanted.data)
    assert torch.equal(plan.pack.row, wanted.row)
    assert plan.report.sites == bound.report.sites


@pytest.mark.parametrize("case", tiny.VECTOR_CASES)
def test_vectors_of_linears_have_no_plan(case: str) -> None:
    assert plan_for(case)[0] is None  # some values come from weights, or from nowhere
