"""The connection between a fork server and its client, as one of them leaves."""

from __future__ import annotations

import pytest

from gyre.rewards.fork_server.connection import Ended, make_pair


@pytest.mark.parametrize("news", [0, 1, 2])
def test_a_worker_that_ends_as_the_scorer_leaves_is_no_traceback(news: int) -> None:
    """With news unread the socket is reset, without it is broken."""
    scorer, server = make_pair()
    for name in range(news):
        server.send(Ended(name, 0, None, {}))
    scorer.close()
    server.send(Ended(9, 9, None, {}))
    server.send(Ended(10, 0, None, {}))
    server.close()
