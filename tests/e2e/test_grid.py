"""Ranks in any arrangement give the tokens that one rank gives."""

from dataclasses import asdict

import pytest

from tests.e2e.grid import ALWAYS, SLOW, answers, arguments, on_one_rank

# Slow ones answer with more tokens, and so do those that are always run, once more.
LINES = [
    *(pytest.param(line, 6, id=line) for line in ALWAYS),
    *(pytest.param(line, 16, id=f"{line} long", marks=pytest.mark.slow) for line in ALWAYS),
    *(pytest.param(line, 16, id=line, marks=pytest.mark.slow) for line in SLOW),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("line", "new_tokens"), LINES)
def test_same_tokens_as_one_rank(line: str, new_tokens: int) -> None:
    found = answers(asdict(arguments(line)), new_tokens)
    assert found == on_one_rank(line.split()[0], new_tokens)


def test_the_grid_is_as_large_as_promised() -> None:
    lines = [*ALWAYS, *SLOW]
    assert len(set(lines)) == len(lines) >= 40
    every = {line: arguments(line) for line in lines}
    for part in (lines, ALWAYS):
        args = [every[line] for line in part]
        assert {a.moe_a2a_backend for a in args} == {
            "none",
            "deepep",
            "mooncake",
            "mori",
            "flashinfer",
            "ascend_fuseep",
        }
        assert len({line.split()[0] for line in part}) == 6
        assert max(a.pp_size for a in args) == (4 if part is lines else 2)
    assert {args.tp_size for args in every.values()} == set(range(1, 9))
