"""Pools of ranks that live as long as the session: making one costs more than most tests."""

from collections.abc import Iterator

import pytest

from tests.distributed.moe_ranks import Pools, rank_pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """pools(n): n ranks that nobody kills."""
    yield from rank_pools()
