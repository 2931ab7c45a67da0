"""Pools of ranks that live as long as the session: making one costs more than most tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.comm.network.store import LocalStore
from tests.distributed.moe_ranks import Pools, rank_pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """pools(n): n ranks that nobody kills."""
    yield from rank_pools()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    made = LocalStore(tmp_path)
    yield made
    made.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of ranks on a GPU come by how many there are: each number has ranks of its own, and not
    all of them find room at once."""
    places = [place for place, item in enumerate(items) if _ranks_on_gpu(item)]
    chosen = sorted((items[place] for place in places), key=_ranks_on_gpu)
    for place, item in zip(places, chosen, strict=True):
        items[place] = item


def _ranks_on_gpu(item: pytest.Item) -> int:
    """0 for all other tests."""
    here = item.path.parent == Path(__file__).parent and item.get_closest_marker("gpu") is not None
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("size", 0) if here and callspec is not None else 0
