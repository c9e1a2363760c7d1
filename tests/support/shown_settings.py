"""Which settings of a long test CI shows. In: the names of all, and of those shown. Out: parameters;
the others are marked as variants, which `make test-variants` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
from _pytest.mark import ParameterSet


def show(shown: Collection[str], names: Iterable[str]) -> list[ParameterSet]:
    """Return a parameter for each name; those that are not in `shown` are variants."""
    every = list(names)
    assert set(shown) <= set(every), "a name that is shown is one of all"
    return [
        pytest.param(name, marks=() if name in shown else pytest.mark.variant) for name in every
    ]
