"""The experts of a safetensors checkpoint: where their tensors lie, and how each layer is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from moegraft.errors import MoegraftError, UnsupportedError, shorten
from moegraft.quant.stored import (
    KNOWN_LEAVES,
    UNUSED_LEAVES,
    MatrixLayout,
    StoredShape,
    find_layout,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_NAMES = {
    **{"gate_proj": "gate", "w1": "gate"},
    **{"up_proj": "up", "w3": "up"},
    **{"down_proj": "down", "w2": "down"},
}
_SINGLE = re.compile(r"^(?P<path>.*\bexperts)\.(?P<expert>\d{1,6})\.(?P<name>\w+)\.(?P<leaf>\w+)$")
_FUSED = re.compile(
    r"^(?P<path>.*\bexperts)\.(?P<name>gate_up_proj|up_proj|down_proj)(?:[._](?P<leaf>\w+))?$"
)
#: Leaves of fused tensors -> those of single ones.
_FUSED_LEAVES = {None: "weight", "scale_inv": "weight_scale_inv", "weight_scale": "weight_scale"}
#: Called with (tensors read, tensors in all).
Progress = Callable[[int, int], None]


class Place(NamedTuple):
    """What a tensor of the checkpoint is to its experts.

    Attributes:
        path: of the experts, as the checkpoint names it.
        expert: its number; None for a tensor that holds all experts.
        part: ``gate``, ``up``, ``down`` or ``gate_up``.
        leaf: what of it, such as ``weight`` or ``weight_scale``.

    Example: ``model.layers.0.mlp.experts.3.w2.weight`` is ``("model.layers.0.mlp.experts", 3,
    "down", "weight")``.
    """

    path: str
    expert: int | None
    part: str
    leaf: str


@dataclass(frozen=True)
class StoredExperts:
    """One layer's experts in a checkpoint.

    Attributes:
        path: as the checkpoint names it.
        fused: one tensor holds all experts.
        num_experts: E.
        layout: how their matrices are stored.
        weight_format: name of the format, or ``"unquantized"``.
        parts: ``("gate", "up", "down")``, without gate, or ``("gate_up", "down")``.
        keys: (expert or None, part, leaf) -> name of the tensor.
        unused: names of tensors that are known and not needed: scales for static activations.
    """

    path: str
    fused: bool
    num_experts: int
    layout: MatrixLayout
    weight_format: str
    parts: tuple[str, ...]
    keys: Mapping[tuple[int | None, str, str], str] = field(repr=False)
    unused: tuple[str, ...] = ()

    def leaves(self, expert: int | None, part: str) -> dict[str, str]:
        """Return leaf -> name of the tensors of one matrix."""
        wanted = (*self.layout.leaves, "bias")
        found = {leaf: self.keys.get((expert, part, leaf)) for leaf in wanted}
        return {leaf: key for leaf, key in found.items() if key is not None}


def place_of(key: str) -> Place | None:
    """Return what a tensor is to some experts; None for any other tensor."""
    found = _SINGLE.match(key)
    if found:
        part = _NAMES.get(found["name"])
        return Place(found["path"], int(found["expert"]), part or found["name"], found["leaf"])
    found = _FUSED.match(key)
    if found:
        leaf = _FUSED_LEAVES.get(found["leaf"], found["leaf"])
        return Place(found["path"], None, found["name"].removesuffix("_proj"), str(leaf))
    return None


class Checkpoint:
    """A folder of safetensors files, open for reading; a context manager.

    Attributes:
        folder: the folder.
        config: ``config.json``, or empty where there is none.
        files: name of each tensor -> name of its file.

    Raises:
        MoegraftError: no readable checkpoint; says which file is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self.config: dict[str, Any] = _json(folder / "config.json", required=False)
        index = folder / INDEX_FILE
        if index.is_file():
            found = _json(index).get("weight_map")
            if not isinstance(found, dict) or not all(
                isinstance(name, str) and Path(name).name == name for name in found.values()
            ):
                raise MoegraftError(f"{str(index)!r} has no weight_map of names in its folder.")
            self.files = dict(found)
        else:
            keys = self._file(SINGLE_FILE).keys()
            self.files = dict.fromkeys(keys, SINGLE_FILE)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()
        self._stack.close()

    def get(self, key: str) -> torch.Tensor:
        """Read a tensor."""
        found: torch.Tensor = self._reader(key).get_tensor(key)
        return found

    def shape(self, key: str) -> StoredShape:
        """Return dtype and sizes of a tensor without reading it."""
        found = self._reader(key).get_slice(key)
        return StoredShape(found.get_dtype(), tuple(found.get_shape()))

    def experts(self) -> tuple[StoredExperts, ...]:
        """Return every layer's experts, in the order of the names.

        Raises:
            UnsupportedError: a format that is not known here, or has no implementation.
            MoegraftError: parts of an expert are missing, or experts differ in their format.
        """
        groups: dict[str, dict[tuple[int | None, str, str], str]] = {}
        for key in self.files:
            place = place_of(key)
            if place is not None:
                groups.setdefault(place.path, {})[place[1:]] = key
        return tuple(self._group(path, keys) for path, keys in sorted(groups.items(), key=_order))

    def _group(self, path: str, keys: Mapping[tuple[int | None, str, str], str]) -> StoredExperts:
        experts = {expert for expert, _, _ in keys}
        fused = experts == {None}
        if not fused and experts != set(range(len(experts))):
            raise MoegraftError(
                f"{path} has tensors of experts {shorten(sorted(map(str, experts)))}; expected "
                f"either 0 to {len(experts) - 1} or tensors of all experts."
            )
        found: dict[tuple[str, MatrixLayout], list[str]] = {}
        matrices: dict[tuple[int | None, str], dict[str, StoredShape]] = {}
        for (expert, part, leaf), key in keys.items():
            matrices.setdefault((expert, part), {})[leaf] = self.shape(key)
        for (expert, part), shapes in matrices.items():
            where = f"{path}.{part}" if expert is None else f"{path}.{expert}.{part}"
            layout = find_layout(shapes)
            if layout is None:
                raise UnsupportedError(_unknown(where, shapes))
            name = layout.weight_format(shapes)
            assert name is not None
            found.setdefault((name, layout), []).append(where)
        if len(found) > 1:
            each = "; ".join(f"{n} in {shorten(names, 2)}" for (n, _), names in found.items())
            raise MoegraftError(f"{path} mixes formats: {each}. One layer has one format.")
        parts = tuple(p for p in ("gate_up", "gate", "up", "down") if (None, p) in matrices)
        if not fused:
            parts = tuple(p for p in ("gate", "up", "down") if (0, p) in matrices)
        for expert in [None] if fused else range(len(experts)):
            here = {part for e, part in matrices if e == expert}
            if here != set(parts) or "down" not in here or not here & {"up", "gate_up"}:
                which = path if expert is None else f"{path}.{expert}"
                raise MoegraftError(
                    f"{which} has {', '.join(sorted(here))}; expected gate, up and down, or up "
                    "and down, the same for every expert."
                )
        (weight_format, layout), _ = next(iter(found.items()))
        count = self.shape(keys[None, "down", layout.leaves[0]]).shape[0] if fused else len(experts)
        unused = tuple(key for (_, _, leaf), key in keys.items() if leaf in UNUSED_LEAVES)
        return StoredExperts(path, fused, count, layout, weight_format, parts, keys, unused)

    def _reader(self, key: str) -> Any:
        if key not in self.files:
            raise MoegraftError(f"{str(self.folder)!r} has no tensor {key!r}.")
        return self._file(self.files[key])

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            if not path.is_file():
                raise MoegraftError(
                    f"{str(self.folder)!r} lacks {name!r}; a checkpoint of safetensors files is "
                    "expected, as save_pretrained writes it."
                )
            try:
                self._open[name] = self._stack.enter_context(safe_open(str(path), "pt"))
            except (SafetensorError, OSError) as error:
                raise MoegraftError(
                    f"{str(path)!r} is no readable safetensors file: {error}."
                ) from error
        return self._open[name]


def _unknown(where: str, shapes: Mapping[str, StoredShape]) -> str:
    known = next((KNOWN_LEAVES[leaf] for leaf in sorted(shapes) if leaf in KNOWN_LEAVES), None)
    have = ", ".join(f"{leaf} {s.dtype} {list(s.shape)}" for leaf, s in sorted(shapes.items()))
    what = f"is in {known}, which is not implemented" if known else "is in no format known here"
    return f"{where} {what}; it has {have}."


def _order(item: tuple[str, object]) -> list[tuple[int, str]]:
    """Sort layer 10 behind layer 9."""
    return [(int(p) if p.isdigit() else -1, p) for p in item[0].split(".")]


def _json(path: Path, required: bool = True) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoegraftError(f"{str(path)!r} is not readable: {error}.") from error
    if not isinstance(found, dict):
        raise MoegraftError(f"{str(path)!r} holds no JSON object.")
    return found


def matrices_of(stored: StoredExperts) -> Iterator[tuple[int | None, str]]:
    """Yield (expert or None, part) of all matrices of a layer."""
    for expert in [None] if stored.fused else range(stored.num_experts):
        for part in stored.parts:
            yield expert, part
