"""Speculative decoding as the flags describe it: data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to make drafts. `module` (engine/speculate/drafters.py imports it when it is chosen)
    registers how; the other fields say which flags it takes and their values where they are
    unset."""

    module: str
    num_steps: int = 3
    num_draft_tokens: int = 4
    takes_model: bool = False
    """--speculative-draft-model-path may name a model."""
    needs_model: bool = False
    no_token_map: str = ""
    """Why --speculative-token-map may not name the tokens that are proposed; empty if it may."""
    on_ranks: bool = True
    """A model makes the drafts, on the same ranks as the target; if not, the planner's host."""
    reads_target: bool = False
    """Its cache is computed from the target's hidden states; if not, from tokens alone."""


EAGLE: Final = Algorithm("moesaic.engine.speculate.eagle", takes_model=True, reads_target=True)
ALGORITHMS: Final = {
    "EAGLE": EAGLE,
    "NEXTN": EAGLE,
    "EAGLE3": Algorithm(
        "moesaic.engine.speculate.eagle",
        takes_model=True,
        needs_model=True,
        reads_target=True,
        no_token_map="has a map of its own, in the head's d2t",
    ),
    "STANDALONE": Algorithm(
        "moesaic.engine.speculate.standalone",
        takes_model=True,
        needs_model=True,
        no_token_map="proposes tokens of a whole model",
    ),
    "NGRAM": Algorithm(
        "moesaic.engine.speculate.ngram",
        num_steps=11,
        num_draft_tokens=12,
        on_ranks=False,
        no_token_map="has no draft model",
    ),
}
"""By the value of --speculative-algorithm."""
MOST_DRAFTS: Final = 1024
"""The most drafts that a step verifies. Each takes a row of the logits and of the low-latency
buffers."""
LEAST_ACC: Final = 1e-9


class AcceptThresholds(NamedTuple):
    """When a random row takes a draft behind it, as SGLang defines it: with p(d) the target's
    probability of draft d, and s the sum of p(d) and those of its siblings before it, of which none
    was taken, it takes d with the random number u if u < s / acc or p(d) >= single. If it takes
    none, its token is drawn from the others. With acc = single = 1 the token has the target's
    distribution."""

    single: float = 1.0
    acc: float = 1.0

    @classmethod
    def of(cls, single: float, acc: float) -> AcceptThresholds | None:
        """None where drafts change no answer."""
        return None if single == acc == 1.0 else cls(single, max(acc, LEAST_ACC))


UNQUANTISED: Final = "unquant"
"""The value of --speculative-draft-model-quantization for none."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The resolved flags. A draft has up to `num_drafts` tokens."""

    algorithm: str
    num_steps: int
    num_draft_tokens: int
    """Tokens of a request in the step that verifies them: the newest one, and the drafts."""
    draft_model_path: str | None = None
    topk: int = 1
    """Branches that a draft model continues."""
    thresholds: AcceptThresholds | None = None
    breadth: int = 1
    """The most drafts behind one token that the flags allow."""

    @property
    def num_drafts(self) -> int:
        """The most drafts of a request."""
        return self.num_draft_tokens - 1

    @property
    def asks_for_trees(self) -> bool:
        """ModelRunner.verifies_trees tells whether there are any."""
        return self.breadth > 1

    @property
    def makes(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]
