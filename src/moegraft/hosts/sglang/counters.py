"""What the plugin did in this process, as counts: the proof that its kernels ran.

A call that is captured in a CUDA graph counts once, at the capture; its replays are not seen here.
"""

from __future__ import annotations

from moegraft.hosts.counting import Counts

#: name -> what it counts.
MEANINGS = {
    "expert_layers": "experts layers that run on moegraft",
    "expert_layers_left": "experts layers that were left to SGLang, with a line in the log",
    "linear_layers": "linears with adapters that run on moegraft",
    "linear_layers_left": "linears that were left to SGLang",
    "expert_calls": "calls of an experts layer",
    "expert_calls_with_adapters": "those among them whose batch had a live adapter",
    "linear_calls": "calls of a linear whose batch had a live adapter",
    "slots_loaded": "adapters that were put into a slot",
}

_counts = Counts(MEANINGS)
count = _counts.add
counters = _counts.all
