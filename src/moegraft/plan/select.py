"""Choose a backend by reason, never in silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from moegraft.backends import BACKENDS, load_backend
from moegraft.call import LayerRun, Mode
from moegraft.env import forced_backend
from moegraft.errors import PlanError
from moegraft.problem import Problem
from moegraft.stages import Stages


@dataclass(frozen=True)
class Plan:
    """What runs a problem.

    Attributes:
        problem: the problem it was made for.
        backend: name in :data:`moegraft.backends.BACKENDS`.
        stages: the backend's stage functions.
        mode: how adapters and base overlap.
        run: the whole layer as one fused run of stages; None = compose the stages one by one.
        reasons: why this backend and these kernels, and why not the others; one line each.
    """

    problem: Problem
    backend: str
    stages: Stages
    mode: Mode
    run: LayerRun | None
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """Return the plan as text for people."""
        p = self.problem
        head = (
            f"T={p.num_tokens} K={p.top_k} E={p.num_experts} H={p.hidden} I={p.intermediate} "
            f"{p.dtype} {p.weight_format} on {p.device_type}: backend {self.backend}, "
            f"mode {self.mode}"
        )
        return "\n  ".join([head, *self.reasons])


def make_plan(problem: Problem, backend: str | None = None, mode: Mode | None = None) -> Plan:
    """Pick the backend and its stages for a problem.

    Args:
        problem: what to run.
        backend: force this backend; None = ``MOEGRAFT_BACKEND``, else the first that can.
        mode: force this overlap mode; None = the backend's choice.

    Raises:
        PlanError: the forced backend or mode is unknown, the backend can't run the problem, or none
            can. The message lists every backend with its reason.
    """
    forced = backend or forced_backend()
    if forced is not None and forced not in BACKENDS:
        raise PlanError(f"There is no backend {forced!r}; choose one of {', '.join(BACKENDS)}.")
    if mode is not None and mode not in get_args(Mode):
        raise PlanError(f"There is no mode {mode!r}; choose one of {', '.join(get_args(Mode))}.")
    reasons: list[str] = []
    for name in [forced] if forced else list(BACKENDS):
        module = load_backend(name)
        refusal = module.supports(problem, mode)
        if refusal is None:
            found = module.choose(problem, mode)
            choice = f"{name}: {'forced' if forced else 'first that can run it'}"
            reasons += [choice, found.why]
            if problem.activation == "custom":
                reasons.append("activation: the host's own function, on packed fp32 rows")
            if problem.post_norm:
                reasons.append("norm behind each expert: the host's own module")
            return Plan(problem, name, found.stages, found.mode, found.run, tuple(reasons))
        reasons.append(f"{name}: {refusal}")
    wanted = f"Backend {forced!r} can't" if forced else "No backend can"
    raise PlanError(
        f"{wanted} run a layer with {problem.dtype} {problem.weight_format} weights on "
        f"{problem.device_type}{f' in mode {mode!r}' if mode else ''}: {'; '.join(reasons)}."
    )
