"""One version of a stored adapter, and how bound factors become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.checksum import Digest, SiteSums, checksum_of
from moegraft.adapters.dora import check_resolved
from moegraft.adapters.finite import check_packed
from moegraft.adapters.info import AdapterInfo, ReadAs, check_overflow
from moegraft.adapters.layer_copies import Downward
from moegraft.adapters.report import BindReport
from moegraft.errors import AdapterError
from moegraft.factors import PackedAdapter
from moegraft.packing import pack_adapter, places_of


@dataclass(eq=False)
class Entry:
    """One version of a stored adapter; guarded by the store's lock.

    Attributes:
        name, version, digest, packed, report: what was loaded; never changed.
        read_as: how it was read, None when that is not known.
        on_device: the same as ``packed`` on the GPU, where an update brought it; it goes once the
            update is done.
        fill: puts its factors into a part of the arena, and into ``packed``, which holds nothing
            before; None = ``packed`` holds them. It may take its time, no lock is held.
        slot: the bank slot that holds it, None = on the host only.
        pinned: True when it may not be evicted.
        users: running batches that hold it.
        last_use: the clock at its last use.
        retired: True when its name is gone, or stands for a newer version; it leaves its slot with
            its last user.
    """

    name: str
    version: int
    digest: Digest
    packed: PackedAdapter
    report: BindReport
    read_as: ReadAs | None = None
    on_device: PackedAdapter | None = None
    fill: Callable[[torch.Tensor], None] | None = None
    slot: int | None = None
    pinned: bool = False
    users: int = 0
    last_use: int = 0
    retired: bool = False

    def info(self) -> AdapterInfo:
        """Return what a caller may know of it now."""
        return AdapterInfo(
            name=self.name,
            version=self.version,
            digest=self.digest,
            report=self.report,
            slot=self.slot,
            num_bytes=self.packed.num_bytes,
            pinned=self.pinned,
        )


def new_entry(
    bank: AdapterBank,
    name: str,
    bound: BoundAdapter,
    read_as: ReadAs | None,
    memory: torch.Tensor | None = None,
) -> Entry:
    """Pack and check an adapter; it gets its version when it takes the name.

    Raises:
        AdapterError: see :meth:`moegraft.adapters.AdapterStore.add`.
    """
    check_resolved(name, bound)
    bank.check_rank(name, bound.report.max_rank)
    places = places_of(bound.factors)
    device = bank.device if bank.pins and places == {"cuda"} else torch.device("cpu")
    with device_memory(name, device):
        packed = pack_adapter(bound.factors, bank.layout, bank.dtype, bank.pins, memory, device)
    bank.check_fits(name, packed)
    check_overflow(name, packed, bound.factors)
    if "cuda" in places:
        check_packed(name, packed)  # they were not looked at when they were read
    checksum = checksum_of(packed, bank.layout)
    entry = Entry(name, 0, Digest(checksum), packed, bound.report, read_as)
    if packed.data.is_cuda:
        bring_to_host(entry, bank)
    return entry


@contextmanager
def device_memory(name: str, device: torch.device, num_bytes: int | None = None) -> Iterator[None]:
    """Turn a device's lack of memory to pack an adapter in into an :class:`AdapterError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = "less"
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = f"{torch.cuda.mem_get_info(device)[0] + unused:,}"
        needed = "room" if num_bytes is None else f"{num_bytes:,} bytes"
        raise AdapterError(
            f"Adapter {name!r} needs {needed} on {device}, beside the bank's arena, to be packed "
            f"there, and {free} bytes are free: give its tensors on the CPU, or attach with a "
            "smaller arena_bytes or max_adapters."
        ) from error


def bring_to_host(entry: Entry, bank: AdapterBank, sums: SiteSums | None = None) -> Downward:
    """Let an entry that is on the GPU be on the host, too, with ``sums`` for its checksum."""
    entry.on_device = entry.packed
    host = torch.empty_like(entry.packed.data, device="cpu", pin_memory=True)
    copy = bank.copies.to_host(entry.packed.data, host, sums)
    entry.packed = entry.packed.with_data(host)
    return copy
