"""Processes with a gloo group, kept for many tests: starting one costs seconds."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: Seconds that one call may take on all ranks.
LIMIT = 120.0
#: Seconds for starting the processes, which import torch.
START_LIMIT = 120.0
#: Seconds for a process to end by itself.
PATIENCE = 10.0
_SHARED: list[Ranks] = []


class Ranks:
    """A gloo group of processes that run functions of test modules.

    They find each other through a file and talk over the loopback device: no port is chosen.

    Args:
        size: number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank; return what each returned.

        A failure on any rank, or no answer within the limit, ends all of them; the error says which
        rank and why. The next call starts fresh ones.
        """
        self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        return self._answers(LIMIT, function.__qualname__)

    def stop(self) -> None:
        """End the processes: those that are idle by themselves, others at once."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(PATIENCE)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        if self._processes:
            return
        context = mp.get_context("spawn")
        folder = tempfile.mkdtemp()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, Path(folder) / "store", theirs, _measured_to())
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers(START_LIMIT, "starting")

    def _answers(self, limit: float, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, limit)
            rank = self._pipes.index(ready[0]) if ready else -1  # type: ignore[arg-type]
            try:
                kind, value = self._pipes[rank].recv() if ready else ("error", "no answer")
            except EOFError:
                kind, value = "error", "the process ended"
            if kind == "error":
                for process in self._processes:
                    process.kill()
                self.stop()
                missing = sorted(set(range(self.size)) - set(answers))
                where = f"rank {rank}" if ready else f"ranks {missing}"
                raise AssertionError(f"{what} on {where} of {self.size}: {value}")
            answers[rank] = value
        return [answers[rank] for rank in range(self.size)]


@cache
def shared(size: int) -> Ranks:
    """The processes that all tests of this one share."""
    found = Ranks(size)
    _SHARED.append(found)
    return found


def stop_shared() -> None:
    """End them; the last test is over."""
    for found in _SHARED:
        found.stop()


def _measured_to() -> str | None:
    """Where to leave which lines ran; None = nobody wants to know."""
    coverage = sys.modules.get("coverage")
    running = None if coverage is None else coverage.Coverage.current()
    return None if running is None else str(running.config.data_file)


def _serve(rank: int, size: int, store: Path, pipe: Connection, measured_to: str | None) -> None:
    """What each process does: run what comes, measured or not."""
    if measured_to is None:
        return _run(rank, size, store, pipe)
    from coverage import Coverage

    coverage = Coverage(data_file=measured_to, data_suffix=True, source=["moegraft"])
    coverage.start()
    try:
        _run(rank, size, store, pipe)
    finally:
        coverage.stop()
        coverage.save()


def _run(rank: int, size: int, store: Path, pipe: Connection) -> None:
    """Join the group, then run what comes."""
    # The group's addresses must not depend on how this machine's name resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )
    pipe.send(("done", None))
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", getattr(importlib.import_module(module), name)(rank, *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
