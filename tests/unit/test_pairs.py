"""Which parts of products the fast run takes."""

from itertools import combinations, product
from typing import Any

import pytest

from tests.pairs import every_pair, every_second


def fast(params: list[Any]) -> list[tuple[Any, ...]]:
    return [one.values for one in params if not one.marks]


@pytest.mark.parametrize(
    "axes", [("ab", [1, 2], [True, False]), ("abc", "xyz", [1, 2]), ("abcd", [1, 2], [3], [4, 5])]
)
def test_any_two_values_come_together(axes: Any) -> None:
    every = every_pair(*axes)
    assert [one.values for one in every] == list(product(*axes))
    found = {pair for values in fast(every) for pair in combinations(enumerate(values), 2)}
    assert found == {
        pair for values in product(*axes) for pair in combinations(enumerate(values), 2)
    }
    assert len(fast(every)) < len(every)


def test_half_of_a_product_has_every_value() -> None:
    assert fast(every_second("abc", [1, 2])) == [("a", 1), ("b", 2), ("c", 1)]
    assert fast(every_second([("a", 1), ("b", 2)], [3, 4])) == [("a", 1, 3), ("b", 2, 4)]


def test_the_example_of_the_docstring() -> None:
    assert len(fast(every_pair("ab", [1, 2], [True, False]))) == 4
