"""A second CUDA stream beside the current one: fork, work on both, join.

Everything that both streams touch is allocated on the current stream before the fork and freed
after the join. torch's allocator gives a freed block only to later work of the stream that it was
allocated on, and that comes after the join; so no tensor has to be marked with ``record_stream``,
which would keep its memory from reuse until an event has passed, and in a graph for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch


@dataclass(frozen=True)
class SideStream:
    """The side stream of one consumer stream, with the two events that tie them together.

    All three live as long as the process: a CUDA graph may have captured the events. They are
    recorded anew by each use. On one stream a later record stands for all the work before it, so
    that is right even if two threads share a consumer stream.

    Attributes:
        stream: where side work runs; high priority, so that a little work for it starts at once.
        forked: recorded on the consumer, waited for by the side stream.
        joined: recorded on the side stream, waited for by the consumer.
    """

    stream: torch.cuda.Stream
    forked: torch.cuda.Event
    joined: torch.cuda.Event


_SIDE_STREAMS: dict[tuple[int, int], SideStream] = {}
_LOCK = Lock()
#: Streams of one priority that torch hands out in turn; past them they repeat.
_POOL = 32


def side_stream(consumer: torch.cuda.Stream) -> SideStream:
    """Return the side stream of a consumer stream: one per stream and device, always the same.

    No two consumers share one while torch has streams left.
    """
    key = (consumer.device_index, consumer.cuda_stream)
    with _LOCK:
        found = _SIDE_STREAMS.get(key)
        if found is None:
            taken = {side.stream.cuda_stream for side in _SIDE_STREAMS.values()}
            stream = torch.cuda.Stream(consumer.device, priority=-1)
            for _ in range(_POOL):
                if stream.cuda_stream not in taken and stream != consumer:
                    break
                stream = torch.cuda.Stream(consumer.device, priority=-1)
            assert stream != consumer, "a stream can't be its own side stream"
            found = SideStream(stream, torch.cuda.Event(), torch.cuda.Event())
            _SIDE_STREAMS[key] = found
    return found


@contextmanager
def beside(device: torch.device, work: Callable[[], None]) -> Iterator[None]:
    """Run ``work`` on the side stream while the body runs on the current stream.

    ``work`` starts when all that the current stream was given so far is done. Behind the block the
    current stream waits for it, whether the body raised or not. ``work`` and body must not
    allocate. May be captured in a CUDA graph. On a CPU, ``work`` runs first and then the body.

    Example: ``with beside(x.device, lambda: delta(x, buffer)): gemm(x, out)``; then both
    ``buffer`` and ``out`` may be read.
    """
    if device.type != "cuda":
        work()
        yield
        return
    consumer = torch.cuda.current_stream(device)
    side = side_stream(consumer)
    side.forked.record(consumer)
    side.stream.wait_event(side.forked)
    try:
        with torch.cuda.stream(side.stream):
            work()
        yield
    finally:
        side.joined.record(side.stream)
        consumer.wait_event(side.joined)
