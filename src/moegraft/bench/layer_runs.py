"""A layer over the input sets of a case: run, captured, and checked before it is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from moegraft.bench.cases import DecodeCase, Inputs
from moegraft.bench.harness import Run, Timer
from moegraft.bench.options import AUTO
from moegraft.call import Mode
from moegraft.errors import MoegraftError, PlanError
from moegraft.layer import MoeLoraLayer
from moegraft.reference import moe_lora_reference
from moegraft.testing.compare import (
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    relative_error,
)
from moegraft.testing.poison import poisoned_empty
from moegraft.testing.unrounded import unrounded_weights
from moegraft.types import ExpertWeights, TokenSlots

LayerFunction = Callable[[Inputs, TokenSlots | None], torch.Tensor]
#: Rows of a batch that are compared with the reference, which takes them one by one.
_CHECKED_ROWS = 16
#: Modes that must give the same bits.
_TWINS = (("in_kernel", "fused_serial"), ("two_stream", "serial"))


class WrongResultError(MoegraftError):
    """A configuration is wrong, so none of its speeds may be reported."""


def is_refusal(error: Exception) -> bool:
    """True for what Triton's compiler or the device says to kernels that it has no room for."""
    of_triton = type(error).__module__.startswith("triton")
    return of_triton or str(error).startswith("Triton Error [CUDA]: invalid argument")


class LayerRun:
    """A way to call a layer, for every input set of a case.

    Args:
        case: the inputs.
        function: what is called with one set and slots (None = base only); gives ``[T, H]``.
        name: of what runs, such as an overlap mode.
        plan: what was chosen and why, for records.
        lora: False = calls without slots.
    """

    def __init__(
        self, case: DecodeCase, function: LayerFunction, name: str, plan: str, lora: bool = True
    ) -> None:
        self.case = case
        self.name = name
        self.plan = plan
        self.outs: list[torch.Tensor] = []
        self._function = function
        self._lora = lora

    @staticmethod
    def of_layer(case: DecodeCase, mode: Mode | None, lora: bool = True) -> LayerRun:
        """Make one of a layer in an overlap mode; None = the plan's choice.

        Raises:
            PlanError: no backend runs it in that mode.
        """
        layer = MoeLoraLayer(case.weights, case.table, mode=mode)
        plan = layer.plan(*case.sets[0].topk_ids.shape)

        def function(inputs: Inputs, slots: TokenSlots | None) -> torch.Tensor:
            return layer(inputs.x, inputs.topk_ids, inputs.topk_weights, slots)

        return LayerRun(case, function, plan.mode, plan.explain(), lora)

    def call(self, index: int, lora: bool | None = None) -> torch.Tensor:
        """Run one input set: ``[T, H]``; ``lora`` None = as this run was made."""
        lora = self._lora if lora is None else lora
        slots = TokenSlots(self.case.slots, self.case.live) if lora else None
        return self._function(self.case.sets[index], slots)

    def __call__(self) -> None:
        """Run all input sets as graphs do; results stay in ``outs``, of a graph for good."""
        self.outs = [self._function(inputs, self._graph_slots()) for inputs in self.case.sets]

    def eager(self) -> Run:
        """Return what runs all sets without a graph, with slots made once, as a step does."""
        slots = TokenSlots(self.case.slots, self.case.live) if self._lora else None

        def run() -> None:
            for inputs in self.case.sets:
                self._function(inputs, slots)

        return run

    def one(self) -> None:
        """Run the first input set alone."""
        self.outs = [self._function(self.case.sets[0], self._graph_slots())]

    def _graph_slots(self) -> TokenSlots | None:
        if not self._lora:
            return None
        if self.case.slots.device.type == "cuda":
            return TokenSlots.captured(self.case.slots)
        return TokenSlots(self.case.slots, self.case.live)


class Expected:
    """The reference of a case's first input set, for some rows spread over the batch."""

    def __init__(self, case: DecodeCase) -> None:
        tokens = case.slots.shape[0]
        self.rows = torch.linspace(0, tokens - 1, min(tokens, _CHECKED_ROWS)).round().long()
        rows = self.rows.to(case.slots.device)
        s = case.sets[0]
        inputs = (s.x[rows], s.topk_ids[rows], s.topk_weights[rows])
        factors = [
            case.table.factors(slot) if slot in case.live else None
            for slot in range(case.table.num_slots)
        ]
        self.device_rows = rows
        slots = case.slots[rows].tolist()

        def both(weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
            base = moe_lora_reference(*inputs, weights).cpu()
            if not case.live:
                return base, base
            return base, moe_lora_reference(*inputs, weights, factors, slots).cpu()

        self.base, self.lora = both(case.weights)
        unrounded = unrounded_weights(case.weights)
        self._unrounded = (None, None) if unrounded is None else both(unrounded)

    def check_base(self, base: torch.Tensor) -> dict[str, Any]:
        """Compare the base alone; AssertionError when it is wrong."""
        plain = base[self.device_rows].cpu()
        unrounded = self._unrounded[0]
        assert_close(plain, self.base, plain.dtype, unrounded)
        found = {"rows": len(self.rows), "output_error": relative_error(plain, self.base)}
        if unrounded is not None:
            found["format_error"] = relative_error(self.base, unrounded)
        return found

    def check(self, lora: torch.Tensor, base: torch.Tensor) -> dict[str, Any]:
        """Compare output, base and the delta alone; AssertionError when one is wrong."""
        ours, plain = (t[self.device_rows].cpu() for t in (lora, base))
        found = self.check_base(base)
        unrounded = self._unrounded[1]
        assert_close(ours, self.lora, ours.dtype, unrounded)
        assert_delta_close(ours, plain, self.lora, self.base, unrounded is not None)
        delta = ours.double() - plain.double()
        return {
            **found,
            "output_error": relative_error(ours, self.lora),
            "delta_error": relative_error(delta, self.lora.double() - self.base.double()),
        }


class CheckedRun:
    """A captured layer run whose results were compared before anyone may time it.

    Compared: output, base and delta alone with the reference, from memory that was poisoned where
    the layer allocates it; the replayed graph with the eager call, bit by bit; the same graph with
    all slots -1, and the base rows of one with adapters and base rows in turn, with the layer's
    base, bit by bit.

    Raises:
        WrongResultError: something differs; says what.
    """

    def __init__(self, run: LayerRun, expected: Expected, timer: Timer) -> None:
        self.run = run
        self._timer = timer
        try:
            self._prepare(expected)
        except AssertionError as error:
            title = run.case.request.title()
            raise WrongResultError(f"{title}, {run.name}: {error}") from error

    def _prepare(self, expected: Expected) -> None:
        run = self.run
        with poisoned_empty():
            self.eager, base = run.call(0).clone(), run.call(0, lora=False).clone()
        self.checked = expected.check(self.eager, base)
        self.replay: Run = self._timer.capture(run)
        self.replay()
        assert_same_bits(run.outs[0], self.eager, "the graph and the eager call")
        with self.base_rows(slice(None)):
            self.replay()
            assert_same_bits(run.outs[0], base, "a batch of base rows only and the base layer")
        some = slice(1, None, 3)
        with self.base_rows(some):
            self.replay()
            assert_same_bits(run.outs[0][some], base[some], "base rows among others and the base")
        self.checked["bits"] = "graph equals eager; base rows equal base, all or every third"

    @contextlib.contextmanager
    def base_rows(self, rows: slice) -> Iterator[None]:
        """Make some rows of the batch base rows for a while."""
        slots = self.run.case.slots
        kept = slots.clone()
        slots[rows] = -1
        try:
            yield
        finally:
            slots.copy_(kept)

    def measure(self, cold: bool) -> dict[str, Any]:
        """Return microseconds per layer call: with the adapters, and with base rows only."""
        parts = len(self.run.case.sets)
        found: dict[str, Any] = self._timer.measure(self.replay, parts).record()
        with self.base_rows(slice(None)):
            found["idle_us"] = self._timer.measure(self.replay, parts).median * 1e6
        if cold:
            found["cold_us"] = cold_us(self.run, self._timer)
        return {**found, "checked": self.checked, "plan": self.run.plan}


def checked_mode(
    case: DecodeCase,
    wanted: str,
    expected: Expected,
    timer: Timer,
    runs: dict[str, CheckedRun],
) -> tuple[str, CheckedRun | dict[str, Any]]:
    """Check one mode and add it to those that ran before, some of which must give the same bits.

    Returns:
        Name and run; or name and the figures that stand in its place: ``note`` where no backend
        has the mode, ``error`` where it is wrong or can't be compiled or launched.
    """
    try:
        run = LayerRun.of_layer(case, None if wanted == AUTO else cast(Mode, wanted))
    except PlanError as error:
        return wanted, {"note": str(error)}
    name = run.name
    try:
        checked = CheckedRun(run, expected, timer)
        for pair in _TWINS:
            twin = next((m for m in pair if m != name and name in pair), None)
            if twin in runs:
                try:
                    assert_same_bits(checked.eager, runs[twin].eager, f"{name} and {twin}")
                except AssertionError as error:
                    raise WrongResultError(f"{case.request.title()}: {error}") from error
                checked.checked["bits"] += f"; equals {twin}"
    except WrongResultError as error:
        return name, {"error": str(error)}
    except Exception as error:
        if not is_refusal(error):
            raise
        return name, {"error": f"{case.request.title()}, {name}: {error}"}
    runs[name] = checked
    return name, checked


class CheckedBase:
    """A captured base layer whose results were compared before anyone may time it.

    Raises:
        WrongResultError: its output differs from the reference, or its graph from the eager call,
            or its kernels can't be compiled or launched.
    """

    def __init__(self, run: LayerRun, expected: Expected, timer: Timer) -> None:
        self.run = run
        try:
            with poisoned_empty():
                self.eager = run.call(0).clone()
            self.checked = expected.check_base(self.eager)
            self.replay: Run = timer.capture(run)
            self.replay()
            assert_same_bits(run.outs[0], self.eager, "the graph and the eager call")
        except Exception as error:
            if not isinstance(error, AssertionError) and not is_refusal(error):
                raise
            raise WrongResultError(f"{run.case.request.title()}, base: {error}") from error


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """As :func:`assert_bit_equal`, compared on the device: large results stay where they are."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if actual.dtype == expected.dtype and actual.shape == expected.shape:
        bits = width[actual.element_size()]
        if torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits)):
            return
    assert_bit_equal(actual, expected, what)


def cold_us(run: LayerRun, timer: Timer) -> float:
    """Time the first input set alone, each time after other bytes went through the L2."""
    return timer.measure_cold(timer.capture(run.one)).median * 1e6
