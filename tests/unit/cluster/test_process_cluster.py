"""Which devices a worker sees, and how its end is told. The contract suite has the rest."""

from __future__ import annotations

import pytest

from gyre.cluster.process_cluster import describe_end, visible_devices


@pytest.mark.parametrize(
    ("given", "count", "names"),
    [
        (None, 2, ("0", "1")),
        ("3,5", 2, ("3", "5")),
        ("GPU-a, GPU-b", 2, ("GPU-a", "GPU-b")),
        ("3,5", 1, ("3",)),
        ("", 0, ()),
        (None, 0, ()),
    ],
)
def test_devices_are_those_that_the_starter_sees(given, count, names) -> None:
    assert visible_devices(given, count) == names


def test_an_end_is_told_in_words() -> None:
    assert describe_end(3) == "it ended with exit code 3"
    assert describe_end(-9) == "it was ended by SIGKILL"
    assert describe_end(None) == "it hung up and does not end"
