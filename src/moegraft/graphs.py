"""A step over token buckets, replayed as CUDA graphs: per bucket one for the base, one for LoRA.

Which of the two runs is decided per call by what the host knows: whether any adapter is live.
Adapters may be loaded, swapped, updated and removed between replays: kernels find them through
the bank's table, whose address never changes. The arena must not move either: freeze the bank
first (``before_capture=store.freeze``).

Streams and threads: a replay runs on the current stream; a runner that is called on another
stream than before waits for its own last call. One runner belongs to one thread at a time, and
its graphs share one pool of memory, so that one call's outputs are gone with the next call.
Runners share nothing with each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from moegraft.errors import MoegraftError
from moegraft.gc_pause import gc_paused
from moegraft.layer import MoeLoraLayer
from moegraft.no_waits import no_waits
from moegraft.static_batch import StaticBatch, StaticInput
from moegraft.types import TokenSlots

Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
#: What is run: static inputs and slots (None = base only) -> tensors ``[T, ..]``.
Step: TypeAlias = Callable[[Mapping[str, torch.Tensor], TokenSlots | None], Outputs]
#: Called while preparing: graphs done, graphs in all, what comes next.
Progress: TypeAlias = Callable[[int, int, str], None]


class CaptureError(MoegraftError):
    """A step can't be captured: it waits for the GPU, fails, or its bank can't be frozen."""


#: CUDA knows one capture at a time per process.
_CAPTURING = threading.Lock()


class StepRunner:
    """Runs a step on static buffers, bucket by bucket, without graphs: what a CPU can do.

    Args:
        step: what to run. It reads its inputs from the tensors it gets, every time, and decides
            nothing by their values.
        inputs: what the inputs look like.
        buckets: numbers of rows to prepare.
        device: where the buffers are.
    """

    def __init__(
        self,
        step: Step,
        inputs: Mapping[str, StaticInput],
        buckets: Sequence[int],
        *,
        device: torch.device | str,
    ) -> None:
        self.batch = StaticBatch(inputs, buckets, device)
        self.device = torch.device(device)
        self._step = step
        self._rows = 0
        self._live: tuple[int, ...] = ()

    def __call__(
        self, inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None = None
    ) -> Outputs:
        """Run one batch.

        Args:
            inputs: name -> ``[T, ..]``.
            slots: adapter slot per row; None, or none live = the base graph.

        Returns:
            The step's outputs, their first T rows, until the next call.

        Raises:
            MoegraftError: as :meth:`StaticBatch.load`.
        """
        self.load(inputs, slots)
        outputs, rows = self.execute(), self._rows
        if isinstance(outputs, torch.Tensor):
            return outputs[:rows]
        return tuple(output[:rows] for output in outputs)

    def load(self, inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None = None) -> None:
        """Copy a batch into the static buffers; :meth:`execute` runs it, as often as wanted."""
        self._rows = self.batch.load(inputs, slots)
        self._live = () if slots is None else slots.live

    def execute(self) -> Outputs:
        """Run what was loaded; all rows of the bucket, padded ones included."""
        bucket = self.batch.bucket_of(self._rows)
        slots = TokenSlots(self.batch.slots(bucket), self._live) if self._live else None
        return self._step(self.batch.views(bucket), slots)

    def drop(self, lora_only: bool = False) -> None:
        """Forget graphs (only those with adapters); they are captured again when needed."""

    def follow(self) -> None:
        """Let the current stream wait for the runner's last call, if that was on another."""


class _Graph(NamedTuple):
    """A captured step and where its outputs are."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs


class GraphRunner(StepRunner):
    """Runs a step by replaying CUDA graphs.

    A graph that is missing is captured when it is first needed; :meth:`warmup` captures all.

    Args:
        step, inputs, buckets, device: as for :class:`StepRunner`. The step must not wait for the
            GPU, and its memory must come from torch's allocator.
        before_capture: called ahead of every capture; ``store.freeze`` for steps with adapters.
        changed: tensors that the step changes in place, such as a cache's length; a capture
            leaves them as they were.
        warmup_runs: eager runs before each capture, in which everything is compiled; the last of
            several finds a step that waits for the GPU.

    Raises:
        MoegraftError: no CUDA device. In a call: :class:`CaptureError`; what the step had changed
            in place is as it was.
    """

    def __init__(
        self,
        step: Step,
        inputs: Mapping[str, StaticInput],
        buckets: Sequence[int],
        *,
        device: torch.device | str = "cuda",
        before_capture: Callable[[], None] | None = None,
        changed: Sequence[torch.Tensor] = (),
        warmup_runs: int = 2,
    ) -> None:
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            raise MoegraftError(
                f"CUDA graphs need a CUDA device, and device is {str(device)!r}"
                f"{'' if torch.cuda.is_available() else ', of which this machine has none'}; "
                "StepRunner runs the same step without graphs."
            )
        super().__init__(step, inputs, buckets, device=device)
        self._before_capture = before_capture
        self._changed = tuple(changed)
        self._warmup_runs = warmup_runs
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        with torch.cuda.device(self.device):
            self._pool = torch.cuda.graph_pool_handle()
            self._capture_stream = torch.cuda.Stream()
        self._last_stream = torch.cuda.current_stream(self.device)

    def warmup(self, lora: bool = True, progress: Progress | None = None) -> None:
        """Capture what is missing, the largest bucket first, so that the others fit its memory.

        Args:
            lora: also the graphs with adapters.
            progress: told before each graph and at the end.
        """
        kinds = (False, True) if lora else (False,)
        todo = [(bucket, kind) for bucket in reversed(self.batch.buckets) for kind in kinds]
        tell = progress or (lambda done, total, text: None)
        for done, (bucket, kind) in enumerate(todo):
            tell(done, len(todo), f"{'LoRA' if kind else 'base'}, {bucket} rows")
            self._graph(bucket, kind)
        tell(len(todo), len(todo), "done")

    @property
    def num_graphs(self) -> int:
        """How many graphs are captured."""
        return len(self._graphs)

    def load(self, inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None = None) -> None:
        self.follow()
        super().load(inputs, slots)

    def execute(self) -> Outputs:
        self.follow()
        found = self._graph(self.batch.bucket_of(self._rows), bool(self._live))
        found.graph.replay()
        return found.outputs

    def drop(self, lora_only: bool = False) -> None:
        for key in list(self._graphs):
            if key[1] or not lora_only:
                del self._graphs[key]

    def follow(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream != self._last_stream:
            stream.wait_stream(self._last_stream)
            self._last_stream = stream

    def _graph(self, bucket: int, lora: bool) -> _Graph:
        found = self._graphs.get((bucket, lora))
        if found is None:
            try:
                if self._before_capture is not None:
                    self._before_capture()
                with (
                    _CAPTURING,
                    torch.inference_mode(False),
                    torch.no_grad(),
                    torch.cuda.device(self.device),
                ):
                    found = self._graphs[bucket, lora] = self._capture(bucket, lora)
            except Exception as error:
                raise CaptureError(
                    f"a step of {bucket} rows can't be captured as a CUDA graph "
                    f"({type(error).__name__}: {error})"
                ) from error
        return found

    def _capture(self, bucket: int, lora: bool) -> _Graph:
        views = self.batch.views(bucket)

        def run() -> Outputs:
            # A new object per run: what is derived from slots must be derived in the graph.
            slots = TokenSlots.captured(self.batch.slots(bucket)) if lora else None
            return self._step(views, slots)

        outer = torch.cuda.current_stream()
        self._capture_stream.wait_stream(outer)
        try:
            self._warm(run)
        finally:
            outer.wait_stream(self._capture_stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # What the collector would free may not be freed during a capture.
            with (
                gc_paused(strict=True),
                torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._capture_stream,
                    capture_error_mode="thread_local",
                ),
            ):
                outputs = run()
        except BaseException:
            torch.cuda.set_stream(outer)  # torch leaves its own set when the capture fails
            raise
        return _Graph(graph, outputs)

    def _warm(self, run: Callable[[], Outputs]) -> None:
        """Run eagerly on the capture's stream; what the step changes in place ends as it was."""
        with torch.cuda.stream(self._capture_stream):
            saved = [tensor.clone() for tensor in self._changed]
            for i in range(self._warmup_runs):
                try:
                    with no_waits(0 < i == self._warmup_runs - 1):
                        run()
                finally:
                    for tensor, value in zip(self._changed, saved, strict=True):
                        tensor.copy_(value)


def layer_step(layer: Callable[..., torch.Tensor]) -> Step:
    """Return one MoE layer, or its share on a rank of several, as a step over
    :func:`layer_inputs`."""
    return lambda inputs, slots: layer(
        inputs["x"], inputs["topk_ids"], inputs["topk_weights"], slots
    )


def layer_inputs(
    layer: MoeLoraLayer,
    top_k: int,
    ids_dtype: torch.dtype = torch.int64,
    weights_dtype: torch.dtype = torch.float32,
) -> dict[str, StaticInput]:
    """Describe one MoE layer's inputs; padded rows go to no expert (id -1)."""
    return {
        "x": StaticInput((layer.weights.hidden,), layer.weights.dtype),
        "topk_ids": StaticInput((top_k,), ids_dtype, -1),
        "topk_weights": StaticInput((top_k,), weights_dtype, 0),
    }
