"""Helpers for tests of this package and of engines that embed it: seeded inputs, strict comparison.

Nothing here is imported by the rest of the package, but for the measurements of ``bench``.
"""

from moegraft.testing.adapters import (
    assert_same_factors,
    bound_adapter,
    constant_adapter,
    random_adapter,
)
from moegraft.testing.cases import LayerCase, assert_case, layer_case, table_on
from moegraft.testing.compare import (
    TOLERANCES,
    Tolerance,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    relative_error,
    tolerance_of,
)
from moegraft.testing.generate import (
    FACTOR_KINDS,
    FactorKind,
    Routing,
    random_activations,
    random_factors,
    random_routing,
    random_weights,
)
from moegraft.testing.poison import poisoned_empty
from moegraft.testing.unrounded import unrounded_weights
from moegraft.testing.variants import ACTIVATIONS, LAYOUTS

__all__ = [
    "ACTIVATIONS",
    "FACTOR_KINDS",
    "FactorKind",
    "LAYOUTS",
    "LayerCase",
    "Routing",
    "TOLERANCES",
    "Tolerance",
    "assert_bit_equal",
    "assert_case",
    "assert_close",
    "assert_delta_close",
    "assert_same_factors",
    "bound_adapter",
    "constant_adapter",
    "layer_case",
    "poisoned_empty",
    "random_activations",
    "random_adapter",
    "random_factors",
    "random_routing",
    "random_weights",
    "relative_error",
    "table_on",
    "tolerance_of",
    "unrounded_weights",
]
