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
from moegraft.hosts.transformers.decode import STEP_INPUTS, StaticDecode
from moegraft.hosts.transformers.limits import (
    cache_bytes,
    free_bytes,
    why_not_called,
    why_not_static,
    why_not_step,
)
from moegraft.hosts.transformers.state import StepState
from moegraft.static_batch import StaticInput

#: Static caches come in multiples of this many tokens, so that calls of like lengths share one.
LENGTH_STEP = 128
#: Caches (with their graphs) that are kept between calls.
MAX_KEPT = 4

#: A static cache may take this share of the memory that is free.
MAX_SHARE = 0.8


class _Session:
    """One generate call: the cache it decodes on, once it has one."""

    def __init__(self, must: bool) -> None:
        self.decode: _DecodeSteps | None = None
        self.must = must
        self.refused = False


class _DecodeSteps(StaticDecode):
    """The decode forwards of generate calls of one shape, one call at a time."""

    _made_for: object = None

    def fits(self, batch_size: int, length: int) -> bool:
        """True when calls of this shape decode here."""
        return (self.batch_size, self.max_length) == (batch_size, length)

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
        self._store.wait_for_copies()
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
        return (
            why_not_called(self.model.generation_config, args, kwargs)
            or self._broken
            or why_not_static(self.model)
        )

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
            batch_size, length = kwargs["batch_size"], kwargs["max_cache_len"]
            length = -(-length // LENGTH_STEP) * LENGTH_STEP
            reason = self._why_not_room(batch_size, length)
            if reason is not None:
                self._refuse(session, reason)
                from transformers import DynamicCache

                return DynamicCache(config=self.model.config.get_text_config(decoder=True))
            session.decode = self._acquire(batch_size, length)
            return session.decode.cache

        return make_cache

    def _why_not_room(self, batch_size: int, length: int) -> str | None:
        """Return why a static cache can't be made, or None; kept ones make room for it."""
        device = self._store.device
        if device.type != "cuda" or any(f.fits(batch_size, length) for f in list(self._free)):
            return None
        wanted = cache_bytes(self.model, batch_size, length)
        if wanted > MAX_SHARE * free_bytes(device):
            with self._lock:
                self._free.clear()
            free = free_bytes(device)
            if wanted > MAX_SHARE * free:
                return (
                    f"a static cache of {batch_size} x {length} tokens takes {wanted:,} of "
                    f"{free:,} free bytes; lower max_new_tokens (or max_length)"
                )
        return None

    def _refuse(self, session: _Session, reason: str) -> None:
        """Go on without graphs and say why, or raise where graphs were demanded."""
        if session.must:
            raise UnsupportedError(f"generate(graphs=True): {reason}.")
        session.refused = True
        self.say(reason)

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
        reason = why_not_step(inputs, fixed, decode.max_length)
        if reason is None:
            try:
                return decode.step(forward, _expanded(inputs, decode.batch_size), fixed)
            except CaptureError as error:
                logger.debug("The capture failed.", exc_info=True)
                reason = self._broken = str(error)
        self._refuse(session, reason)
        return None

    def _acquire(self, batch_size: int, length: int) -> _DecodeSteps:
        """Take a free cache of this shape, or make one."""
        with self._lock:
            for found in self._free:
                if found.fits(batch_size, length):
                    self._free.remove(found)
                    found.reset()
                    return found
        return _DecodeSteps(self.model, self._state, self._store, batch_size, length, self.runner)

    def _release(self, decode: _DecodeSteps) -> None:
        with self._lock:
            if self._shadowed:  # not closed meanwhile
                self._free.append(decode)
                del self._free[:-MAX_KEPT]


def _expanded(inputs: dict[str, Any], batch_size: int) -> dict[str, torch.Tensor]:
    """Give every input one entry per row; generate may share one over the batch."""
    return {name: value.expand(batch_size, *value.shape[1:]) for name, value in inputs.items()}
