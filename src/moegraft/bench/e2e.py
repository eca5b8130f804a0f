"""``bench e2e``: a whole model's decode speed without adapters, with one, and with several mixed.

A model of the sizes of Qwen3-30B-A3B with random weights, decoding greedily by graph replay: a step
is the full forward with attention, head and the choice of the token.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import moegraft
from moegraft.bench import records
from moegraft.bench.e2e_model import WholeModel, load_random_adapters, random_model
from moegraft.bench.harness import Timing
from moegraft.bench.peer_figures import VLLM_END_TO_END
from moegraft.errors import MoegraftError

Say = Callable[[str], None]
#: Steps after which the graph's tokens are compared with those of the same steps run eagerly.
CHECKED_STEPS = 4


@dataclass(frozen=True)
class EndToEndOptions:
    """What to measure.

    Attributes:
        model: sizes of the model.
        batches: rows.
        adapters: how many are loaded, and mixed in turn.
        rank: of each, on attention and experts of all layers.
        prompt, steps: tokens per row before, and decode steps during the measurement.
        commit: written to the records; None = asked from git.
    """

    model: WholeModel = field(default_factory=WholeModel)
    batches: tuple[int, ...] = (1, 16, 64)
    adapters: int = 8
    rank: int = 16
    prompt: int = 256
    steps: int = 64
    commit: str | None = None

    def __post_init__(self) -> None:
        for name in ("adapters", "rank", "prompt"):
            if getattr(self, name) < 1:
                raise MoegraftError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.model.layers < 1:
            raise MoegraftError(f"--layers must be at least 1, got {self.model.layers}.")
        if self.steps <= CHECKED_STEPS:
            raise MoegraftError(f"--steps must be above {CHECKED_STEPS}, got {self.steps}.")

    @property
    def names(self) -> list[str]:
        """Names of the adapters."""
        return [f"adapter-{i}" for i in range(self.adapters)]

    def mixes(self, batch: int) -> dict[str, list[str | None]]:
        """Return title -> adapter of each row."""
        found: dict[str, list[str | None]] = {"no LoRA": [None] * batch}
        found["1 adapter"] = [self.names[0]] * batch
        mixed = min(self.adapters, batch)
        if mixed > 1:
            found[f"{mixed} adapters"] = list(itertools.islice(itertools.cycle(self.names), batch))
        return found


def run_e2e(
    options: EndToEndOptions, device: torch.device, say: Say = lambda text: None
) -> Iterator[records.Record]:
    """Build, attach, load, then measure each batch and mix; yields a record for each.

    A mix whose tokens are wrong has an ``error`` in place of its figures.
    """
    say(f"building a model of {options.model.layers} layers")
    start = time.perf_counter()
    graft = moegraft.attach(
        random_model(options.model, device), max_adapters=options.adapters, max_rank=options.rank
    )
    built = time.perf_counter()
    num_bytes = load_random_adapters(graft, options.names, options.rank, say)
    loaded = time.perf_counter()
    head = {
        **records.header(records.END_TO_END, options.commit),
        "model": asdict(options.model),
        "rank": options.rank,
        "adapter_bytes": num_bytes,
        "prompt": options.prompt,
        "steps": options.steps,
        "seconds": {"build": built - start, "adapters": loaded - built},
    }
    generator = torch.Generator().manual_seed(0)
    for batch in options.batches:
        shape = (batch, options.prompt)
        ids = torch.randint(0, options.model.vocabulary, shape, generator=generator).to(device)
        runs = _Batch(graft, ids, options.steps)
        base: dict[str, Any] = {}
        for title, rows in options.mixes(batch).items():
            say(f"{batch} rows, {title}")
            found = runs.measure(rows)
            base = base or found
            if "ms_per_step" in found and "ms_per_step" in base:
                found["retention"] = base["ms_per_step"] / found["ms_per_step"]
            peer = VLLM_END_TO_END.get(title, {}).get(batch)
            is_same = options.model == WholeModel() and options.rank == 16
            yield {
                **head,
                "batch": batch,
                "mix": title,
                **found,
                "vllm_tokens_s": peer if is_same else None,
            }
        runs.close()
    graft.detach()


class _Batch:
    """The decoders of one number of rows: by graphs, and the same steps run eagerly."""

    def __init__(self, graft: Any, ids: torch.Tensor, steps: int) -> None:
        length = ids.shape[1] + steps + 2
        self._ids = ids
        self._steps = steps
        self._graphs = graft.decoder(ids.shape[0], length)
        self._eager = graft.decoder(ids.shape[0], length, graphs=False)
        self._base_tokens: torch.Tensor | None = None

    def measure(self, rows: list[str | None]) -> dict[str, Any]:
        """Check some tokens, then time steps; ``error`` in place of figures when they differ."""
        self._eager.prefill(self._ids, rows)
        wanted = self._eager.run(CHECKED_STEPS).clone()
        self._eager.close()
        prefill = self._prefill_seconds(rows)
        tokens = self._graphs.run(CHECKED_STEPS)
        different = int((tokens != wanted).any(1).sum())
        if different:
            return {"error": f"tokens of {different} rows differ from those of eager steps"}
        timing = self._time(self._steps - CHECKED_STEPS)
        tokens = self._graphs.tokens.clone()
        self._graphs.close()
        if self._base_tokens is None:
            self._base_tokens = tokens
        changed = int((tokens != self._base_tokens).any(1).sum())
        adapted = sum(name is not None for name in rows)
        checked = {"eager_steps": CHECKED_STEPS, "rows_unlike_base": changed, "rows": adapted}
        return {
            "ms_per_step": timing.median * 1e3,
            "ms_low": timing.low * 1e3,
            "ms_high": timing.high * 1e3,
            "tokens_s": len(rows) / timing.median,
            "prefill_ms": prefill * 1e3,
            "checked": checked,
        }

    def _prefill_seconds(self, rows: list[str | None]) -> float:
        """Start the batch on the graphs' decoder; seconds of the prompt's forward."""
        self._wait()
        start = time.perf_counter()
        self._graphs.prefill(self._ids, rows)
        self._wait()
        return time.perf_counter() - start

    def _time(self, steps: int) -> Timing:
        if self._ids.device.type != "cuda":
            seconds = []
            for _ in range(steps):
                start = time.perf_counter()
                self._graphs.step()
                seconds.append(time.perf_counter() - start)
            return Timing.of(seconds)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self._graphs.step()
            event.record()
        torch.cuda.synchronize()
        return Timing.of([a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)])

    def _wait(self) -> None:
        if self._ids.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Free caches and graphs ahead of the next batch."""
        self._graphs.close()
        del self._graphs, self._eager
        gc.collect()
        if self._ids.device.type == "cuda":
            torch.cuda.empty_cache()
