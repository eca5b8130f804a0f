"""Where the tensors of a file go in memory: those of single experts as a model's arena has them.

A file has its tensors in the order of their names: all those of expert 0, of 1, of 10, .. A bank
has one kind behind the other, each in the order of experts. Who reads the values into memory can
put them there at once, for nothing; to put 1.7 GB in order afterwards takes as long as to read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moegraft.adapters.keys import EXPERT_NAMES
from moegraft.adapters.stored import Header

_EXPERTS = ".experts."
#: Of an expert's number.
_MAX_DIGITS = 9
#: Fewer tensors stay where they are: a file may have a hundred thousand modules of two.
_LEAST = 32
#: In the order of a site's projections.
_PROJECTIONS = ("gate", "up", "down")


class _Blocks(NamedTuple):
    """Experts with equally many tensors each, one expert behind the other.

    Attributes:
        first: number of the first tensor, counted in the order of the file.
        suffixes: of the first expert's tensors.
        experts: their numbers, as the file has them.
    """

    first: int
    suffixes: Sequence[str]
    experts: Sequence[int]


def arranged(header: Header) -> Any:
    """Return where each tensor begins in memory: int64 array, in the order of the header.

    Together they cover the same bytes as in the file. Tensors of experts that have the same kinds
    of one dtype change places within the bytes that these experts have in the file, all others
    stay where they are.
    """
    order = header.order
    kinds = header.kind_of[order]
    names = [header.names[i] for i in order.tolist()]
    places = header.begins.copy()
    for first, suffixes, experts in _blocks(names):
        count, each = len(experts), len(suffixes)
        tensors = order[first : first + count * each].reshape(count, each)
        of_expert = kinds[first : first + count * each].reshape(count, each)
        alike = [header.kinds[number] for number in of_expert[0].tolist()]
        if (of_expert != of_expert[0]).any() or len({kind.dtype for kind in alike}) > 1:
            continue
        if not all(kind.num_bytes for kind in alike):
            continue
        rank = np.empty(count, dtype=np.int64)
        rank[np.argsort(experts, kind="stable")] = np.arange(count)
        begin = int(header.begins[tensors[0, 0]])
        for slot in sorted(range(each), key=lambda i: _in_a_site(suffixes[i])):
            num_bytes = alike[slot].num_bytes
            places[tensors[:, slot]] = begin + rank * num_bytes
            begin += count * num_bytes
    return places


def _blocks(names: Sequence[str]) -> Iterator[_Blocks]:
    """Yield the experts of each module, where they are many; looks at each name once or so."""
    at = 0
    while at < len(names):
        head, number = _expert(names[at])
        if not number:
            at += 1
            continue
        lead = f"{head}{number}."
        first, end = at, at + 1
        while end < len(names) and names[end].startswith(lead):
            end += 1
        suffixes = [name[len(lead) :] for name in names[first:end]]
        experts = [int(number)]
        for at in range(end, len(names) + 1, end - first):
            last = at + len(suffixes) - 1
            if last >= len(names):
                break
            other, number = _expert(names[at])
            if other != head or not number or not names[last].startswith(f"{head}{number}."):
                break
            experts.append(int(number))
        if len(experts) > 1 and len(experts) * len(suffixes) >= _LEAST:
            yield _Blocks(first, suffixes, experts)


def _expert(name: str) -> tuple[str, str]:
    """Return what stands before an expert's number, and the number; it is "" where none is."""
    path, dots, rest = name.partition(_EXPERTS)
    number, dot, _ = rest.partition(".")
    plain = dot and len(number) <= _MAX_DIGITS and number.isascii() and number.isdecimal()
    return path + dots, number if plain else ""


def _in_a_site(suffix: str) -> tuple[int, str]:
    """Return what sorts an expert's tensors as a site has them: projections, A before B."""
    name = EXPERT_NAMES.get(suffix.partition(".")[0])
    return _PROJECTIONS.index(name) if name else len(_PROJECTIONS), suffix


class Places:
    """Bytes of a file and of memory, as runs of which each lies in one piece in both.

    Args:
        begins: in the file, int64, in its order; together the tensors cover it.
        places: in memory, of the same tensors.
        sizes: in bytes.
    """

    def __init__(self, begins: Any, places: Any, sizes: Any) -> None:
        some = sizes > 0
        begins, places, sizes = begins[some], places[some], sizes[some]
        new = np.ones(len(begins), dtype=bool)
        new[1:] = places[1:] != places[:-1] + sizes[:-1]
        self._begins, self._places = begins[new], places[new]

    def parts(self, memory: memoryview, begin: int, end: int) -> list[memoryview]:
        """Return where bytes ``begin <= at < end`` of the file go, in the file's order."""
        first = int(np.searchsorted(self._begins, begin, "right")) - 1
        behind = int(np.searchsorted(self._begins, end, "left"))
        runs = self._begins[first:behind]
        starts = np.maximum(runs, begin)
        to = self._places[first:behind] + (starts - runs)
        lengths = np.diff(starts, append=end)
        return [memory[a:b] for a, b in zip(to.tolist(), (to + lengths).tolist(), strict=True)]
