"""An export by several ranks, beside a disk that takes longer than a collective may."""

from __future__ import annotations

import pytest

from export_cases import exported_slowly
from gyre.models.hub.folders import CHECKSUMS_FILE
from rank_pool import RankPool

TIMEOUT_S = 6.0  # of a collective


@pytest.fixture
def pair():
    pool = RankPool(2, timeout_s=TIMEOUT_S)
    yield pool
    pool.close()


@pytest.mark.slow
def test_ranks_wait_for_the_first_ones_disk_in_no_collective(pair, tmp_path):
    (_, first), (signs, other) = pair.run(
        exported_slowly, str(tmp_path), sync_s=1.5 * TIMEOUT_S, deadline_s=60.0, fails=False
    )
    assert (first, other) == ("", "")
    assert signs > 100, "who watches for a hang sees that it waits"
    assert (tmp_path / "export" / CHECKSUMS_FILE).is_file()


@pytest.mark.slow
def test_a_first_rank_that_fails_at_its_disk_ends_the_wait(pair, tmp_path):
    told = [
        text
        for _, text in pair.run(
            exported_slowly, str(tmp_path), sync_s=1.0, deadline_s=60.0, fails=True
        )
    ]
    assert told[0].startswith("SnapshotError: export to ") and "No space left on device" in told[0]
    assert told[1].startswith(
        "RankError: export ended on rank 1: rank 0 failed: SnapshotError: export to "
    )
    assert not (tmp_path / "export").exists()


@pytest.mark.slow
def test_a_wait_for_the_first_rank_has_a_deadline(pair, tmp_path):
    told = [
        text
        for _, text in pair.run(
            exported_slowly, str(tmp_path), sync_s=5.0, deadline_s=0.5, fails=False
        )
    ]
    assert told[1].startswith("DeadlineError: rank 0 has not begun to compare the export ")
    assert "rank 1 failed: DeadlineError" in told[0]
