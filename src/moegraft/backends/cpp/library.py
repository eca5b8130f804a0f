"""The compiled library and the structures its functions take."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from moegraft.backends.cpp.build import BuildError, library_path
from moegraft.backends.cpp.instructions import InstructionSet, available
from moegraft.env import compiled_kernels, logger
from moegraft.errors import MoegraftError

#: The numbers of dtypes, orders and activations in the source.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ORDERS = {"gate_first": 0, "up_first": 1, "interleaved": 2, "no_gate": 3}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


class WeightsStruct(ctypes.Structure):
    """Weights ``[E, out, in]`` by strides in elements, with their bias ``[E, out]``; see
    ``source/arguments.h``."""

    _fields_ = (
        ("data", c_void_p), ("dtype", c_int64), ("expert_stride", c_int64),
        ("out_stride", c_int64), ("in_stride", c_int64), ("bias", c_void_p),
        ("bias_dtype", c_int64), ("bias_expert_stride", c_int64), ("bias_stride", c_int64),
    )  # fmt: skip


class TableStruct(ctypes.Structure):
    """A site's factor table; see ``source/arguments.h``."""

    _fields_ = (
        ("records", c_void_p), ("slot_words", c_int64), ("expert_map", c_void_p),
        ("map_stride", c_int64), ("arena", c_void_p), ("dtype", c_int64),
    )  # fmt: skip


class LayerStruct(ctypes.Structure):
    """One layer call; see ``source/arguments.h``."""

    _fields_ = (
        ("x", c_void_p), ("x_dtype", c_int64), ("x_stride", c_int64), ("topk_ids", c_void_p),
        ("wide_ids", c_int64), ("topk_weights", c_void_p), ("slots", c_void_p), ("out", c_void_p),
        ("out_stride", c_int64), ("num_tokens", c_int64), ("top_k", c_int64),
        ("num_experts", c_int64), ("hidden", c_int64), ("intermediate", c_int64),
        ("expert_offset", c_int64), ("gate_up", WeightsStruct), ("down", WeightsStruct),
        ("order", c_int64), ("activation", c_int64), ("limited", c_int64), ("limit", c_double),
        ("alpha", c_double), ("up_shift", c_double), ("scale", c_double), ("table", TableStruct),
        ("threads", c_int64),
    )  # fmt: skip


class LinearStruct(ctypes.Structure):
    """One call of a linear's LoRA; see ``source/arguments.h``."""

    _fields_ = (
        ("x", c_void_p), ("x_dtype", c_int64), ("x_stride", c_int64), ("out", c_void_p),
        ("out_dtype", c_int64), ("out_stride", c_int64), ("slots", c_void_p),
        ("num_tokens", c_int64), ("in_features", c_int64), ("out_features", c_int64),
        ("table", TableStruct), ("threads", c_int64),
    )  # fmt: skip


def _loaded(path: Path) -> ctypes.CDLL:
    """Load a library; BuildError unless its functions take what is given to them."""
    try:
        loaded = ctypes.CDLL(str(path))
        for name, struct in (("layer", LayerStruct), ("linear", LinearStruct)):
            size = loaded[f"moegraft_{name}_bytes"]
            size.restype = c_int64
            assert size() == ctypes.sizeof(struct), (name, size(), ctypes.sizeof(struct))
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} can't be loaded: {error}") from error
    return loaded


class Library:
    """The functions of one built library.

    Args:
        instructions: what it was built for.

    Raises:
        BuildError: it can't be built or loaded.
    """

    def __init__(self, instructions: InstructionSet) -> None:
        self.instructions = instructions
        loaded = _loaded(library_path(instructions))
        self._layer, self._linear = loaded.moegraft_layer, loaded.moegraft_linear_lora
        self._layer.restype = self._linear.restype = c_int64

    def layer(self, arguments: LayerStruct) -> None:
        """Run a layer; MemoryError when there is no room for its rows."""
        self._done(self._layer(ctypes.byref(arguments)))

    def linear_lora(self, arguments: LinearStruct) -> None:
        """Add a linear's delta; MemoryError when there is no room for its rows."""
        self._done(self._linear(ctypes.byref(arguments)))

    def _done(self, code: int) -> None:
        if code:
            raise MemoryError("The CPU kernels found no memory for the rows of a batch.")


def best_library() -> Library | BuildError:
    """Return the library that ``MOEGRAFT_COMPILE`` asks for, by default for the best instructions
    here, or why there is none; the reason is logged once.

    Raises:
        MoegraftError: the setting names instructions that this processor doesn't have.
    """
    return _library(compiled_kernels())


@cache
def _library(setting: str) -> Library | BuildError:
    sets = {found.name: found for found in available()}
    if setting not in ("0", "1", *sets):
        raise MoegraftError(
            f"MOEGRAFT_COMPILE={setting!r}: use 0, 1, or instructions of this processor: "
            f"{', '.join(sets) or 'none are known'}."
        )
    errors = []
    if setting == "0":
        errors.append(BuildError("MOEGRAFT_COMPILE=0"))
    elif not sets:
        errors.append(BuildError("this processor has none of the instruction sets that are served"))
    else:
        # An old compiler may not know the best instructions.
        for found in [sets[setting]] if setting != "1" else sets.values():
            try:
                return Library(found)
            except BuildError as error:
                errors.append(error)
    logger.info("The CPU runs on torch's operators: no compiled kernels (%s).", errors[0])
    return errors[0]
