"""Which settings of a long test CI shows. In: all settings, and those shown. Out: parameters; the
others are marked as variants, which `make test-variants` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

Setting = TypeVar("Setting", str, int, tuple[Any, ...])


def show(shown: Collection[Setting], settings: Iterable[Setting]) -> list[ParameterSet]:
    """Return parameters for each setting: a tuple has several. Those that are not in `shown` are
    variants."""
    every = list(settings)
    assert set(shown) <= set(every), "a setting that is shown is one of all"
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in shown else pytest.mark.variant,
        )
        for one in every
    ]
