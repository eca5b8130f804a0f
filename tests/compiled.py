"""What the tests of the compiled CPU kernels share."""

from __future__ import annotations

import pytest

from moegraft.backends.cpp.build import BuildError
from moegraft.backends.cpp.library import best_library

#: For parameters that are the backend ``cpp``.
needed = pytest.mark.skipif(
    "isinstance(__import__('compiled').best_library(), __import__('compiled').BuildError)",
    reason="no compiled kernels",
)


def require() -> None:
    """Skip the test where there are no compiled kernels, and say why."""
    library = best_library()
    if isinstance(library, BuildError):
        pytest.skip(f"no compiled kernels: {library}")
