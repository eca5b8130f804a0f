"""The routed op on CPU tensors, whose delta comes from outside: that of the CPU backend."""

from moegraft.backends.cpu.routed import run_routed

__all__ = ["run_routed"]
