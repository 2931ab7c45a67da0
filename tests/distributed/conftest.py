"""Pools of ranks that live as long as the session: making one costs more than most tests."""

from collections.abc import Callable, Iterator

import pytest

from moesaic.comm.local import LocalRanks

Pools = Callable[[int], LocalRanks]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """pools(n): n ranks that nobody kills."""
    made: dict[int, LocalRanks] = {}

    def pool(size: int) -> LocalRanks:
        if size not in made:
            made[size] = LocalRanks(size, timeout=110)
        return made[size]

    yield pool
    for ranks in made.values():
        ranks.close()
