"""The layouts that can be written: one line each."""

from __future__ import annotations

from moegraft.adapters.writers.base import ExpertNames, Pair, Writer, Written
from moegraft.adapters.writers.peft import PeftWriter
from moegraft.adapters.writers.per_expert import PerExpertWriter
from moegraft.adapters.writers.stacked import SharedOuterWriter, StackedWriter

WRITERS: dict[str, Writer] = {
    writer.name: writer
    for writer in (PeftWriter(), PerExpertWriter(), StackedWriter(), SharedOuterWriter())
}

__all__ = ["WRITERS", "ExpertNames", "Pair", "Writer", "Written"]
