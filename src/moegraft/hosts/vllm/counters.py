"""What the plugin did in this process, as counts: the proof that its kernels ran.

A call that is captured in a CUDA graph counts once, at the capture; its replays are not seen here.
"""

from __future__ import annotations

from typing import Any

from moegraft.hosts.counting import Counts

#: name -> what it counts.
MEANINGS = {
    "expert_layers": "experts layers that run on moegraft",
    "expert_layers_left": "experts layers that were left to vLLM, with a line in the log",
    "linear_layers": "linears with adapters that run on moegraft",
    "linear_layers_left": "linears that were left to vLLM",
    "expert_calls": "calls of an experts layer",
    "expert_calls_with_adapters": "those among them whose batch had a live adapter",
    "linear_calls": "calls of a linear whose batch had a live adapter",
    "adapters_loaded": "adapters that were read and fit",
    "adapters_refused": "adapters that were refused with a message",
    "adapters_completed": "adapters without factors for some experts or projections",
}

_counts = Counts(MEANINGS)
count = _counts.add
counters = _counts.all


class WorkerExtension:
    """Lets an engine's workers be asked: ``--worker-extension-cls`` with this class's dotted name.

    ``LLM.collective_rpc("moegraft_counters")`` then returns one dict per worker, and so does
    ``POST /collective_rpc`` of a server in development mode.
    """

    def moegraft_counters(self, *_: Any) -> dict[str, int]:
        """Return the counts of this worker."""
        return counters()
