"""What became of one request, as its client saw it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BenchPrompt:
    """One request to be. `tokens`: how long the server should find it, 0 if nobody knows; `ids`:
    the prompt itself, where it is sent as tokens."""

    text: str
    tokens: int
    output_len: int
    ids: list[int] | None = None


@dataclass(slots=True)
class Outcome:
    """Times are of one clock, in seconds. An arrival is what one read from the socket brought."""

    prompt: BenchPrompt
    started: float = 0.0
    ended: float = 0.0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    # Tokens that had come by each arrival, where the server says so.
    counts: array[int] = field(default_factory=lambda: array("l"))
    text: str = ""
    finished: bool = False
    streamed: bool = True
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""

    @property
    def latency(self) -> float:
        return self.ended - self.started

    @property
    def ttft(self) -> float | None:
        """Until the first token; None if answers came whole."""
        return self.arrivals[0] - self.started if self.streamed and self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first."""
        later = (self.output_tokens or 0) - 1
        if later < 1 or not self.streamed or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / later

    def tokens_by_arrival(self) -> list[int]:
        """How many tokens each arrival brought. Where the server counts only at the end, they are
        spread evenly, as nothing better is known."""
        total, number = self.output_tokens or 0, len(self.arrivals)
        so_far = list(self.counts)
        if len(so_far) != number:
            so_far = [total * (place + 1) // number for place in range(number)]
        return [now - before for before, now in zip([0, *so_far], so_far, strict=False)]

    def itls(self) -> list[float]:
        """Seconds between tokens; tokens that came together share the time since the last ones."""
        found: list[float] = []
        if not self.streamed or not self.arrivals:
            return found
        last = self.arrivals[0]
        for time, tokens in list(zip(self.arrivals, self.tokens_by_arrival(), strict=True))[1:]:
            if tokens > 0:
                found += [(time - last) / tokens] * tokens
                last = time
        return found
