"""Copies into the arena on a stream of their own, in the order of the model's layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from moegraft.adapters.checksum import SiteSums
from moegraft.adapters.streams import StreamOrder
from moegraft.factors import PackedAdapter

#: Sites that lie side by side are copied together up to this size: a copy costs a few microseconds.
_CHUNK_BYTES = 4 << 20
#: What slides to a place that overlaps it goes through a buffer of this size.
_BOUNCE_BYTES = 64 << 20


class Downward(NamedTuple):
    """A copy to the host: its end, and the sums that came with it, to be read after that."""

    done: torch.cuda.Event
    sums: torch.Tensor | None


class LayerCopies:
    """Brings packed adapters into the arena while earlier work, and earlier layers, compute.

    A copy waits for what may still read the memory that it writes to. A layer waits for the copies
    of its own site, so that the first layers run while the factors of the last ones are on their
    way. The host waits for nothing. On a CPU a copy is done when :meth:`start` returns.

    Args:
        device: where the arena is.
        order: keeps the copies behind the readers.
    """

    def __init__(self, device: torch.device, order: StreamOrder) -> None:
        self._device = device
        self._order = order
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._downward: torch.cuda.Stream | None = None
        self._filling: torch.cuda.Stream | None = None
        self._arrived: dict[str, torch.cuda.Event] = {}
        #: Number and end of the newest copy; always set together.
        self._last: tuple[int, torch.cuda.Event] | None = None
        self._finished = 0

    def start(self, region: torch.Tensor, packed: PackedAdapter) -> None:
        """Copy an adapter's data to ``region``, a part of the arena of the same length."""
        if self._device.type != "cuda":
            region.copy_(packed.data)
            return
        with self._lock, torch.cuda.device(self._device):
            stream = self._before_copy()
            if packed.data.is_cuda:
                stream.wait_stream(torch.cuda.current_stream())  # which fills the data
                packed.data.record_stream(stream)
            with torch.cuda.stream(stream):
                for begin, end, sites in _chunks(packed):
                    region[begin:end].copy_(packed.data[begin:end], non_blocking=True)
                    arrived = torch.cuda.Event()
                    arrived.record(stream)
                    self._arrived.update(dict.fromkeys(sites, arrived))
                self._started(stream)

    def before_fill(self) -> None:
        """Let :meth:`fill` wait for all that may still read or write free parts of the arena."""
        if self._device.type != "cuda":
            return
        with self._lock, torch.cuda.device(self._device):
            if self._filling is None:
                self._filling = torch.cuda.Stream(self._device)
            self._filling.wait_stream(self._own_stream())
            self._behind_all(self._filling)

    def fill(self, region: torch.Tensor, write: Callable[[torch.Tensor], None]) -> None:
        """Let ``write`` put factors into ``region``, which :meth:`before_fill` made ready.

        Copies of other adapters go on meanwhile: no lock is held. The work is queued behind that of
        the current stream. On a GPU ``write`` must have waited for it when it returns, since layers
        are not told what has arrived.
        """
        if self._device.type != "cuda":
            write(region)
            return
        stream = self._filling
        assert stream is not None, "before_fill() was not called"
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                try:
                    write(region)
                except BaseException:
                    stream.synchronize()  # what was launched still writes to the region
                    raise

    def slide(
        self, arena: torch.Tensor, begin: int, end: int, target: int, sites: Iterable[str]
    ) -> None:
        """Move elements ``[begin, end)`` of the arena down to ``target``, which they may overlap.

        Layers of ``sites`` wait for it.
        """
        if self._device.type != "cuda":
            _slide(arena, begin, end, target)
            return
        with self._lock, torch.cuda.device(self._device):
            stream = self._before_copy()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _slide(arena, begin, end, target)
                arrived = self._started(stream)
            self._arrived.update(dict.fromkeys(sites, arrived))

    def to_host(
        self, data: torch.Tensor, host: torch.Tensor, sums: SiteSums | None = None
    ) -> Downward:
        """Copy ``data``, which is on the GPU, to page-locked memory.

        It is on its way when this returns, on a stream of its own, behind the current one:
        :meth:`start` may be given ``host`` at once, whoever reads it on the host must wait. What is
        written to the arena later waits until it was read.

        Args:
            data, host: from where, to where.
            sums: those of ``data`` to bring, too.
        """
        with self._lock, torch.cuda.device(self._device):
            if self._downward is None:
                self._downward = torch.cuda.Stream(self._device)
            self._downward.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._downward):
                found = None
                if sums is not None:
                    on_device = sums.of(data)
                    found = torch.empty_like(on_device, device="cpu", pin_memory=True)
                    found.copy_(on_device, non_blocking=True)
                host.copy_(data, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            data.record_stream(self._downward)
        return Downward(done, found)

    def _before_copy(self) -> torch.cuda.Stream:
        """Return the stream of the copies, behind all that may still read or write the arena."""
        stream = self._own_stream()
        self._behind_all(stream)
        return stream

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    def _behind_all(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for all that may read or write the arena, but for copies into it."""
        if self._downward is not None:
            stream.wait_stream(self._downward)
        self._order.before_write(stream)

    def _started(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Note that what the stream has been given by now are the newest copies."""
        done = torch.cuda.Event()
        done.record(stream)
        self._last = (1 if self._last is None else self._last[0] + 1, done)
        return done

    def wait_for(self, site: str) -> None:
        """Let the current stream wait for the newest copy of one site's factors.

        Copies are made one after the other, so those before have arrived then, too.
        """
        if not self._idle():
            event = self._arrived.get(site)
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self) -> None:
        """Let the current stream wait for all copies that were started."""
        last = self._last
        if last is not None and not self._idle():
            torch.cuda.current_stream(self._device).wait_event(last[1])

    def _idle(self) -> bool:
        """True when every copy is done; asks the GPU until it is, and not again after that."""
        last = self._last
        if last is None or last[0] == self._finished:
            return True
        if last[1].query():
            self._finished = last[0]
            return True
        return False


def _chunks(packed: PackedAdapter) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (begin, end, sites) of an adapter's data, sites in the order of the model."""
    limit = _CHUNK_BYTES // packed.data.element_size()
    begin = end = 0
    sites: list[str] = []
    for site, (first, last) in packed.spans.items():
        if sites and (first != end or last - begin > limit):
            yield begin, end, sites
            sites = []
        if not sites:
            begin = first
        end = last
        sites.append(site)
    if sites:
        yield begin, end, sites


def _slide(arena: torch.Tensor, begin: int, end: int, target: int) -> None:
    """Move elements down, in order; in pieces through a buffer where both places overlap."""
    if target + end - begin <= begin:
        arena[target : target + end - begin].copy_(arena[begin:end], non_blocking=True)
        return
    step = _BOUNCE_BYTES // arena.element_size()
    for at in range(begin, end, step):
        piece = arena[at : min(at + step, end)].clone()
        to = target + at - begin
        arena[to : to + len(piece)].copy_(piece, non_blocking=True)
