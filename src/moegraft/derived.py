"""What is derived from an object and kept with it."""

from __future__ import annotations

from typing import Any


class Derived(dict[str, Any]):
    """Derived facts by name. Copies of the object, pickled ones too, begin without any.

    Example: what holds compiled kernels can't be copied, and a copy makes its own when needed.
    """

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        """Leave everything behind."""
        return Derived, ()
