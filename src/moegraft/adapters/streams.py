"""The order of a bank's writes and its readers, which may be on several CUDA streams."""

from __future__ import annotations

import torch


class StreamOrder:
    """Keeps writes and reads of one device's memory in order across streams; no host ever waits.

    Work on one stream is in order by itself. A write on stream A waits for what other streams had
    read so far, and a read on stream B for the last write. On a CPU all of it does nothing.

    Args:
        device: the device whose memory it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: dict[int, torch.cuda.Event] = {}
        self._written: tuple[int, torch.cuda.Event] | None = None

    def before_read(self) -> None:
        """The current stream waits for the last write."""
        if self._device.type == "cuda":
            self._wait_for_write(torch.cuda.current_stream(self._device))

    def after_read(self) -> None:
        """Later writes wait for all that the current stream has been given so far."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            self._readers.setdefault(stream.cuda_stream, torch.cuda.Event()).record(stream)

    def before_write(self, stream: torch.cuda.Stream | None = None) -> None:
        """A stream waits for the other streams' reads and the last write; None = the current one.

        Each batch's reads count from the end of its :meth:`AdapterStore.use` block on.
        """
        if self._device.type == "cuda":
            stream = stream or torch.cuda.current_stream(self._device)
            for reader, event in list(self._readers.items()):
                if reader != stream.cuda_stream:
                    stream.wait_event(event)
            self._wait_for_write(stream)

    def after_write(self) -> None:
        """Later reads on other streams wait for all that the current stream has been given."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            event = torch.cuda.Event() if self._written is None else self._written[1]
            event.record(stream)
            self._written = (stream.cuda_stream, event)

    def synchronize(self) -> None:
        """The host waits for everything on the device; for what moves memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _wait_for_write(self, stream: torch.cuda.Stream) -> None:
        if self._written is not None and self._written[0] != stream.cuda_stream:
            stream.wait_event(self._written[1])
