"""The order of test files: the longest first, so that workers that run files side by side end together."""

from __future__ import annotations

import pytest

LONGEST = ("test_objectives_learn.py", "test_cluster_runs.py", "test_kill_resume.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
