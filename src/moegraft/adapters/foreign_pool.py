"""Factor tables over slot tensors that an engine owns: its memory is read, nothing of it is kept.

The records of a table are offsets from one base address, in units of 16 bytes. Offsets are 64 bits
wide, so they reach any tensor of a device from the lowest of them; all begin at multiples of 16
bytes, as torch's allocators do. A is read where it is. So is B when its storage is rank-major;
where its ranks are adjacent, or its rows begin elsewhere, :meth:`ForeignPool.load` copies the
slot's B once, transposed, since the kernels read whole rank rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from moegraft.adapters.address_span import base_tensor
from moegraft.adapters.foreign_numbers import checked_ranks, checked_scales, checked_slot
from moegraft.errors import AdapterError
from moegraft.factor_table import Arena, SiteTable
from moegraft.factors import (
    A_EXPERT_STRIDE,
    A_OFFSET,
    A_ROW_STRIDE,
    B_EXPERT_STRIDE,
    B_OFFSET,
    B_ROW_STRIDE,
    RANK_I32,
    RECORD_WORDS,
    SCALE_F32,
    SHARED_A_I32,
    UNIT_BYTES,
)
from moegraft.sites import Site


@dataclass(frozen=True, eq=False)
class ForeignFactor:
    """One projection's factors of all slots, as views of the engine's tensors.

    Attributes:
        lora_a: ``[S, Ea, rows, in]``, Ea = E or 1 (shared by all experts), adjacent columns.
        lora_b: ``[S, Eb, out, R]``, Eb likewise, any strides.
        behind: how many projections' rows, of the same rank, come before this one's in ``lora_a``:
            its A begins in row ``behind * rank``.

    Example: one tensor ``[S, E, 2R, H]`` holds gate's rows and then up's: gate has ``behind=0`` and
    up ``behind=1``, both over the whole tensor.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    behind: int = 0


class ForeignPool:
    """A :class:`SiteTable` over an engine's slot tensors of one experts site.

    Writing a slot is the engine's business; :meth:`load` then says what it holds, :meth:`clear`
    that it holds nothing. Both are copies on the current stream. A table never moves.

    Args:
        site: the experts site.
        factors: projection name -> factors; a missing projection never has a delta. All tensors
            have one dtype, which is the table's, and one device.

    Raises:
        AdapterError: shapes, dtypes, devices or alignment don't fit.
    """

    def __init__(self, site: Site, factors: Mapping[str, ForeignFactor]) -> None:
        first = next(iter(factors.values()), None)
        if first is None:
            raise AdapterError(f"{site.name}: a pool needs factors of at least one projection.")
        self.site = site
        self.num_slots = first.lora_a.shape[0] if first.lora_a.dim() else 0
        self.device, self.dtype = first.lora_a.device, first.lora_a.dtype
        for name, factor in factors.items():
            self._check(name, factor)
        with torch.inference_mode(False):
            # A mirror is [S, Eb, R, out (padded to whole units)]; None where B is read in place.
            self._mirrors = {
                name: None if _has_rows(f.lora_b.transpose(2, 3)) else self._mirror(f.lora_b)
                for name, f in factors.items()
            }
            self._factors = dict(factors)
            self._rank_rows = {
                name: f.lora_b.transpose(2, 3) if mirror is None else mirror
                for (name, f), mirror in zip(factors.items(), self._mirrors.values(), strict=True)
            }
            sources = [f.lora_a for f in factors.values()] + list(self._rank_rows.values())
            self._base = min(tensor.data_ptr() for tensor in sources)
            count = len(site.projections)
            self._records = torch.zeros(self.num_slots, count, RECORD_WORDS, dtype=torch.int64)
            expert_map = None
            if site.kind == "experts":
                expert_map = torch.arange(site.num_experts, dtype=torch.int32, device=self.device)
                expert_map = expert_map.repeat(self.num_slots, 1)
            self.table = SiteTable(
                site,
                Arena(base_tensor(sources)),
                self._records.to(self.device, copy=True),
                expert_map,
                max(f.lora_b.shape[3] for f in factors.values()),
                host_ranks=torch.zeros(self.num_slots, count, dtype=torch.int32),
            )
        # The table is good for as long as the memory is: it keeps the tensors alive.
        self.table.host_cache["sources"] = sources

    @property
    def copied_bytes(self) -> int:
        """Bytes that the transposed copies of B take; 0 when every B is read in place."""
        return sum(m.numel() * m.element_size() for m in self._mirrors.values() if m is not None)

    def expect_adapters(self) -> None:
        """Count as used from now on, so that a graph captured before the first load serves it."""
        self.table.host_cache["used"] = True

    def load(
        self,
        slot: int,
        rank: int | Mapping[str, int],
        scale: float | Mapping[str, float] = 1.0,
        *,
        shared: Collection[tuple[str, Literal["A", "B"]]] = (),
        one_a: bool = False,
    ) -> None:
        """Say that a slot holds an adapter now, written on this stream before.

        Args:
            slot: which.
            rank: of all projections, or by name (a missing one has no delta); at most the pool's.
            scale: alpha / r, multiplied in fp32; 1 where the engine has it in B already.
            shared: factors, such as ``("down", "B")``, whose expert 0 stands for all experts in
                this slot, though the tensors have room for each.
            one_a: gate's A is up's too, and is computed once; up's own is not read.

        Raises:
            AdapterError: no such slot or projection, a rank over the pool's, a scale that is no
                finite number, or two ranks for gate and up where they share one A. The slot holds
                what it held then.
        """
        most = {name: factor.lora_b.shape[3] for name, factor in self._factors.items()}
        slot = checked_slot(self.site.name, slot, self.num_slots)
        ranks = checked_ranks(self.site.name, rank, most)
        scales = checked_scales(self.site.name, scale, ranks, most)
        self._check_shared(ranks, one_a)
        with torch.inference_mode(False):
            self._records[slot] = 0
            previous = -1
            for i, projection in enumerate(self.site.projections):
                live = ranks.get(projection.name, 0)
                if not live:
                    previous = -1
                    continue
                name = projection.name
                a_from = "gate" if one_a and name == "up" else name
                self._write_record(slot, i, name, live, scales[name], a_from, shared)
                offset = int(self._records[slot, i, A_OFFSET])
                self._records[slot, i].view(torch.int32)[SHARED_A_I32] = int(offset == previous)
                previous = offset
            self._publish(slot)

    def clear(self, slot: int) -> None:
        """Say that a slot holds nothing; its tokens get the base result."""
        slot = checked_slot(self.site.name, slot, self.num_slots)
        with torch.inference_mode(False):
            self._records[slot] = 0
            self._publish(slot)

    def _write_record(
        self,
        slot: int,
        i: int,
        name: str,
        rank: int,
        scale: float,
        a_from: str,
        shared: Collection[tuple[str, Literal["A", "B"]]],
    ) -> None:
        factor, mirror = self._factors[name], self._mirrors[name]
        if mirror is not None:
            out = factor.lora_b.shape[2]
            mirror[slot, :, :rank, :out].copy_(factor.lora_b[slot, :, :, :rank].transpose(1, 2))
        a, b = self._factors[a_from].lora_a[slot], self._rank_rows[name][slot]
        a = a[:, rank * self._factors[a_from].behind :]
        a, b = a[:1] if (a_from, "A") in shared else a, b[:1] if (name, "B") in shared else b
        record = self._records[slot, i]
        for rows, words in (
            (a, (A_OFFSET, A_EXPERT_STRIDE, A_ROW_STRIDE)),
            (b, (B_OFFSET, B_EXPERT_STRIDE, B_ROW_STRIDE)),
        ):
            record[words[0]] = (rows.data_ptr() - self._base) // UNIT_BYTES
            record[words[1]] = rows.stride(0) if rows.shape[0] > 1 else 0
            record[words[2]] = rows.stride(1)
        record.view(torch.int32)[RANK_I32] = rank
        record.view(torch.float32)[SCALE_F32] = scale

    def _publish(self, slot: int) -> None:
        """Copy a slot's records to the device, behind whatever the stream reads of them."""
        assert self.table.host_ranks is not None
        row = self._records[slot]
        self.table.host_ranks[slot] = row.view(torch.int32)[:, RANK_I32]
        if bool(self.table.host_ranks[slot].any()):
            self.expect_adapters()
        self.table.records[slot].copy_(row)
        self.table.arena.version += 1

    def _check_shared(self, ranks: Mapping[str, int], one_a: bool) -> None:
        gate, up = self._factors.get("gate"), self._factors.get("up")
        if gate is None or up is None:
            if one_a:
                raise AdapterError(f"{self.site.name}: one_a needs factors of gate and of up.")
            return
        if not one_a and (up.behind or gate.lora_a.data_ptr() != up.lora_a.data_ptr()):
            return
        if len({ranks.get("gate", 0), ranks.get("up", 0)} - {0}) > 1:
            raise AdapterError(
                f"{self.site.name}: gate has rank {ranks['gate']} and up {ranks['up']}, but they "
                "share one A."
            )

    def _mirror(self, lora_b: torch.Tensor) -> torch.Tensor:
        slots, entries, out, rank = lora_b.shape
        unit = UNIT_BYTES // self.dtype.itemsize
        padded = -(-out // unit) * unit
        shape = (slots, entries, rank, padded)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _check(self, name: str, factor: ForeignFactor) -> None:
        where = f"{self.site.name}, {name}"
        if name not in {p.name for p in self.site.projections}:
            names = [p.name for p in self.site.projections]
            raise AdapterError(f"{where}: the site has only {names}.")
        sizes, experts = self.site.projection(name), self.site.num_experts
        a, b = factor.lora_a, factor.lora_b
        if a.dim() != 4 or b.dim() != 4:
            raise AdapterError(
                f"{where}: A {tuple(a.shape)} must be [S, E or 1, rows, in] and B "
                f"{tuple(b.shape)} [S, E or 1, out, R]."
            )
        rows = b.shape[3] * (1 + factor.behind)
        right = (
            a.shape[0] == b.shape[0] == self.num_slots
            and {a.shape[1], b.shape[1]} <= {1, experts}
            and a.shape[3] == sizes.in_features
            and b.shape[2] == sizes.out_features
            and a.shape[2] >= rows
            and a.numel()
            and b.numel()
        )
        if not right:
            raise AdapterError(
                f"{where}: A {tuple(a.shape)} and B {tuple(b.shape)} don't fit S={self.num_slots} "
                f"slots, E={experts} experts (or 1), {sizes.in_features} inputs and "
                f"{sizes.out_features} outputs."
            )
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise AdapterError(f"{where}: A is {self.dtype}; served: float32, bfloat16, float16.")
        for what, tensor in (("A", a), ("B", b)):
            if (tensor.dtype, tensor.device) != (self.dtype, self.device):
                raise AdapterError(
                    f"{where}: {what} is {tensor.dtype} on {tensor.device}, others are "
                    f"{self.dtype} on {self.device}; a table has one dtype and one device."
                )
        if not _has_rows(a):
            raise AdapterError(
                f"{where}: A has shape {tuple(a.shape)} and strides {a.stride()}: rows must be "
                f"adjacent and begin at multiples of {UNIT_BYTES} bytes."
            )


def _has_rows(rows: torch.Tensor) -> bool:
    """True when every row of ``[S, E, R, width]`` is adjacent and begins at 16 bytes."""
    unit = UNIT_BYTES // rows.element_size()
    strides = [rows.stride(d) for d in range(3) if rows.shape[d] > 1]
    aligned = rows.data_ptr() % UNIT_BYTES == 0 and all(s % unit == 0 for s in strides)
    return rows.stride(3) == 1 and aligned
