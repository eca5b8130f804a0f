"""From adapter names per row to slots per token."""

from __future__ import annotations

import pytest
import torch

from moegraft.adapters.batch import RowSlots, normalise_rows, slots_of
from moegraft.errors import AdapterError


def test_row_slots_spread_over_beams_and_tokens() -> None:
    rows = RowSlots([2, -1])
    assert rows.spread(2, 1).slots.tolist() == [2, -1]
    beams = rows.spread(4, 3)
    assert beams.slots.tolist() == [2] * 6 + [-1] * 6
    assert beams.live == (2,) and beams.slots.dtype == torch.int32
    assert rows.spread(4, 3) is beams
    assert rows.spread(2, 0).num_tokens == 0
    assert RowSlots([-1, -1]).spread(2, 2).live == ()
    for bad in (3, 1, 0):
        with pytest.raises(AdapterError, match=f"{bad} rows, but adapters were given for 2"):
            rows.spread(bad, 1)
    with pytest.raises(AdapterError, match="4 rows, but adapters were given for 0"):
        RowSlots([]).spread(4, 1)


def test_rows_take_one_name_for_all_or_one_each() -> None:
    assert normalise_rows(None, 2) == (None, None)
    assert normalise_rows("sql", 3) == ("sql",) * 3
    assert normalise_rows(["a", None], 2) == ("a", None)
    with pytest.raises(AdapterError, match="2 rows but 3 adapters"):
        normalise_rows(["a", None, "b"], 2)
    assert slots_of(("a", None, "b", "a"), {"a": 4, "b": 0}) == (4, -1, 0, 4)
