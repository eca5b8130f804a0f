"""An update by a plan: tensors straight into the arena, or packed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.checksum import Digest, checksum_of
from moegraft.adapters.entry import Entry, bring_to_host, device_memory
from moegraft.adapters.finite import is_finite
from moegraft.adapters.info import ReadAs
from moegraft.adapters.layer_copies import Downward
from moegraft.adapters.update_plan import UpdatePlan
from moegraft.errors import shown
from moegraft.factors import PackedAdapter, TableLayout


class UnusualValuesError(Exception):
    """Some values are not finite in the bank's dtype: reading the update in full says which."""


@dataclass(frozen=True)
class PlannedUpdate:
    """Tensors and the plan that they fit.

    Attributes:
        plan: how they become a packed adapter.
        tensors: all on the CPU, or all on the bank's GPU, in the plan's order.
    """

    plan: UpdatePlan
    tensors: Sequence[torch.Tensor]

    def entry(self, bank: AdapterBank, name: str, read_as: ReadAs | None) -> Entry:
        """Return a new version: from the CPU packed, from a GPU with ``fill`` to do that.

        Raises:
            UnusualValuesError: see there; ``fill`` raises it too.
        """
        plan = self.plan
        report = replace(plan.report, origin=f"update of {shown(name)}")
        data = torch.empty(plan.pack.elements, dtype=plan.dtype, pin_memory=bank.pins)
        packed = plan.pack.packed(data)
        if self.tensors[0].is_cuda:
            late = _LateChecksum(packed, bank.layout)
            entry = Entry(name, 0, Digest(late.find), packed, report, read_as)

            def fill(region: torch.Tensor) -> None:
                bank.copies.fill(region, self._copy)
                late.copy = bank.copies.to_host(region, data, plan.sums)

            entry.fill = fill
            return entry
        plan.fill(self.tensors, data)
        # Where only a part goes to this rank, the others must say the same of theirs.
        given = self.tensors if plan.is_partial else ()
        if not is_finite(data) or not all(is_finite(tensor.float()) for tensor in given):
            raise UnusualValuesError
        return Entry(name, 0, Digest(checksum_of(packed, bank.layout)), packed, report, read_as)

    def stage(self, entry: Entry, bank: AdapterBank) -> None:
        """Pack an entry that has a ``fill`` beside the arena, where it can't go there at once.

        Raises:
            UnusualValuesError: see there.
            AdapterError: the device has no memory for it.
        """
        num_bytes = self.plan.pack.elements * self.plan.dtype.itemsize
        with device_memory(entry.name, bank.device, num_bytes):
            data = torch.empty(self.plan.pack.elements, dtype=self.plan.dtype, device=bank.device)
        self._copy(data)
        entry.fill = None
        entry.packed = self.plan.pack.packed(data)
        copy = bring_to_host(entry, bank, self.plan.sums)
        entry.digest = Digest(_LateChecksum(entry.packed, bank.layout, copy).find)

    def _copy(self, data: torch.Tensor) -> None:
        """Fill ``data`` on the current stream, and wait for it."""
        copies = self.plan.copies
        assert copies is not None, "a plan for the host only"
        if not copies.run(self.tensors, data):
            raise UnusualValuesError


@dataclass
class _LateChecksum:
    """The checksum of an adapter that is on its way to the host.

    Attributes:
        packed: the adapter there.
        layout: the bank's.
        copy: what brings it; None as long as it has not begun.
    """

    packed: PackedAdapter
    layout: TableLayout
    copy: Downward | None = None

    def find(self) -> str:
        """Wait until the adapter is there."""
        assert self.copy is not None, "no copy was begun"
        self.copy.done.synchronize()
        return checksum_of(self.packed, self.layout, self.copy.sums)
