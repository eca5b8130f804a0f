"""``model.generate`` with its decode steps replayed as CUDA graphs.

``generate`` itself runs unchanged, with a static cache and without torch.compile: it picks tokens,
stops rows, streams. Two of the model's methods are shadowed on the instance and act only inside a
session: the one that makes the static cache hands out one that is kept between calls, and forward
replays the graph when it is given exactly one token per row over that cache. Anything else that
generate asks of forward (the prompt, chunks of it) runs as it always does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

from moegraft.adapters import AdapterStore
from moegraft.env import logger
from moegraft.errors import UnsupportedError
from moegraft.graphs import CaptureError, StepRunner
from moegraft.hosts.transformers.decode import STEP_INPUTS, StaticDecode, why_not_static
from moegraft.hosts.transformers.state import StepState
from moegraft.static_batch import StaticInput

#: Static caches come in multiples of this many tokens, so that calls of like lengths share one.
LENGTH_STEP = 128
#: Caches (with their graphs) that are kept between calls.
MAX_KEPT = 4

#: Arguments of generate under which it does not decode one token per row, and why.
_OTHER_MODES = {
    "assistant_model": "assisted decoding checks several tokens at once",
    "prompt_lookup_num_tokens": "prompt lookup checks several tokens at once",
    "custom_generate": "the caller brings a decoding loop",
    "penalty_alpha": "contrastive search copies the cache",
    "dola_layers": "DoLa needs more than logits",
    "output_attentions": "the caller asks for attentions",
    "output_hidden_states": "the caller asks for hidden states",
    "output_router_logits": "the caller asks for router logits",
}


class _Session:
    """One generate call: the cache it decodes on, once it has one."""

    def __init__(self, must: bool) -> None:
        self.decode: _DecodeSteps | None = None
        self.must = must
        self.refused = False


class _DecodeSteps(StaticDecode):
    """The decode forwards of generate calls of one shape, one call at a time."""

    _made_for: object = None

    def step(
        self, forward: Callable[..., Any], inputs: dict[str, torch.Tensor], fixed: dict[str, Any]
    ) -> torch.Tensor:
        """Return a step's logits, ``[B, 1, vocabulary]``, valid until the next step."""
        specs = {
            name: StaticInput(tuple(value.shape[1:]), value.dtype) for name, value in inputs.items()
        }
        if self.runner is None or self._made_for != (specs, fixed):
            self.make_runner(
                lambda static, slots: self.logits(forward, static, slots, fixed), specs, []
            )
            self._made_for = (specs, fixed)
        assert self.runner is not None
        self.runner.load(inputs, self._state.current)
        logits = self.runner.execute()
        assert isinstance(logits, torch.Tensor)
        return logits


class GraphedGenerate:
    """Graph-captured decoding of one attached model; ``close`` takes everything back.

    Args:
        model: the attached model.
        state: its slots.
        store: its adapters.
        runner: how steps run: ``GraphRunner``, or ``StepRunner`` for the same without graphs.
    """

    def __init__(
        self, model: Any, state: StepState, store: AdapterStore, runner: type[StepRunner]
    ) -> None:
        self.model = model
        self.runner = runner
        self._state = state
        self._store = store
        self._session: ContextVar[_Session | None] = ContextVar("moegraft_session", default=None)
        self._lock = threading.Lock()
        self._free: list[_DecodeSteps] = []
        self._shadowed: dict[str, Any] = {}
        self._said: set[str] = set()
        self._broken: str | None = None

    def why_not(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Return why a generate call can't use graphs, or None when it can."""
        given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        configs = [config for config in (given, self.model.generation_config) if config is not None]

        def setting(name: str) -> Any:
            found = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
            return next((value for value in found if value is not None), None)

        if kwargs.get("past_key_values") is not None:
            return "the caller brings a cache"
        if setting("use_cache") is False:
            return "use_cache is False"
        if (setting("num_beams") or 1) > 1:
            return "beam search reorders the cache"
        if setting("cache_implementation") not in (None, "static"):
            return f"cache_implementation is {setting('cache_implementation')!r}"
        for name, reason in _OTHER_MODES.items():
            if setting(name):
                return reason
        return self._broken or why_not_static(self.model)

    def say(self, reason: str) -> None:
        """Log, once per reason, that decoding is not captured."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("generate() runs without CUDA graphs: %s.", reason)

    def generate(self, args: Sequence[Any], kwargs: dict[str, Any], must: bool) -> Any:
        """Run ``model.generate``; ``must`` makes it an error when a graph can't be captured."""
        static = kwargs.get("cache_implementation") == "static"
        options = {**kwargs, "cache_implementation": "static", "disable_compile": True}
        # Kept memory must not belong to the inference mode of the call that made it.
        with self._opened(must) as session, torch.inference_mode(False):
            output = self.model.generate(*args, **options)
            decode = session.decode
            if decode is not None and getattr(output, "past_key_values", None) is decode.cache:
                # The kept cache serves the next call, so the caller gets one of his own.
                output.past_key_values = decode.copy_of_cache(static)
        return output

    def close(self) -> None:
        """Free caches and graphs, and take the shadowing methods off the model."""
        with self._lock:
            self._free.clear()
            for name, before in self._shadowed.items():
                if before is None:
                    self.model.__dict__.pop(name, None)
                else:
                    self.model.__dict__[name] = before
            self._shadowed.clear()

    @contextmanager
    def _opened(self, must: bool) -> Iterator[_Session]:
        self._shadow()
        session = _Session(must)
        token = self._session.set(session)
        try:
            yield session
        finally:
            self._session.reset(token)
            if session.decode is not None:
                self._release(session.decode)

    def _shadow(self) -> None:
        with self._lock:
            if not self._shadowed:
                own = self.model.__dict__
                forward, make_cache = self.model.forward, self.model._prepare_static_cache
                for name in ("forward", "_prepare_static_cache"):
                    self._shadowed[name] = own.get(name)
                own["forward"] = self._forward(forward)
                own["_prepare_static_cache"] = self._make_cache(make_cache)

    def _make_cache(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def make_cache(*args: Any, **kwargs: Any) -> Any:
            session = self._session.get()
            if session is None or session.decode is not None or args:
                return original(*args, **kwargs)
            session.decode = self._acquire(kwargs["batch_size"], kwargs["max_cache_len"])
            return session.decode.cache

        return make_cache

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            session = self._session.get()
            if session is None or session.decode is None or args or session.refused:
                return original(*args, **kwargs)
            logits = self._replayed(original, session, kwargs)
            if logits is None:
                return original(*args, **kwargs)
            from transformers.modeling_outputs import CausalLMOutputWithPast

            return CausalLMOutputWithPast(logits=logits, past_key_values=kwargs["past_key_values"])

        return forward

    def _replayed(
        self, forward: Callable[..., Any], session: _Session, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return a decode step's logits, or None when this is not one, or can't be captured."""
        decode, ids = session.decode, kwargs.get("input_ids")
        assert decode is not None
        if ids is None or tuple(ids.shape) != (decode.batch_size, 1):
            return None
        if kwargs.get("past_key_values") is not decode.cache or not decode.started:
            return None
        inputs = {name: kwargs.get(name) for name in STEP_INPUTS}
        fixed = {k: v for k, v in kwargs.items() if k not in STEP_INPUTS and v is not None}
        fixed.pop("past_key_values")
        reason = _why_not_step(inputs, fixed, decode)
        if reason is None:
            try:
                return decode.step(forward, _expanded(inputs, decode.batch_size), fixed)
            except CaptureError as error:
                logger.debug("The capture failed.", exc_info=True)
                reason = self._broken = str(error)
        if session.must:
            raise UnsupportedError(f"generate(graphs=True): {reason}.")
        session.refused = True
        self.say(reason)
        return None

    def _acquire(self, batch_size: int, length: int) -> _DecodeSteps:
        """Take a free cache of this shape, or make one."""
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        with self._lock:
            for found in self._free:
                if (found.batch_size, found.max_length) == (batch_size, length):
                    self._free.remove(found)
                    found.reset()
                    return found
        return _DecodeSteps(self.model, self._state, self._store, batch_size, length, self.runner)

    def _release(self, decode: _DecodeSteps) -> None:
        with self._lock:
            if self._shadowed:  # not closed meanwhile
                self._free.append(decode)
                del self._free[:-MAX_KEPT]


def _why_not_step(
    inputs: dict[str, Any], fixed: dict[str, Any], decode: StaticDecode
) -> str | None:
    """Return why one decode forward can't be held by a graph, or None when it can."""
    mask, positions = inputs["attention_mask"], inputs["position_ids"]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return f"the attention mask of a step is no 4-D tensor but {_described(mask)}"
    if tuple(mask.shape[-2:]) != (1, decode.max_length):
        return f"the attention mask of a step has shape {tuple(mask.shape)}"
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
        return f"the positions of a step are no 2-D tensor but {_described(positions)}"
    for name, value in fixed.items():
        if not isinstance(value, (bool, int, float, str)):
            return f"the model gets {name} ({_described(value)}) at every step"
    return None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _expanded(inputs: dict[str, Any], batch_size: int) -> dict[str, torch.Tensor]:
    """Give every input one entry per row; generate may share one over the batch."""
    return {name: value.expand(batch_size, *value.shape[1:]) for name, value in inputs.items()}
