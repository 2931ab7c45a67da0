"""The outcome of one request, as its client sees it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BenchPrompt:
    """The prompt of one request."""

    text: str
    tokens: int  # expected length by the server's count; 0: not known
    output_len: int
    ids: list[int] | None = None  # the prompt, if sent as tokens


@dataclass(slots=True)
class Outcome:
    """Times of one clock in seconds. An arrival is an event that carries tokens; events that one
    read from the socket brings have the same time."""

    prompt: BenchPrompt
    started: float = 0.0
    ended: float = 0.0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    # Tokens received by each arrival, if the server reports them.
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
        """Seconds until the first token; None without streaming."""
        return self.arrivals[0] - self.started if self.streamed and self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first."""
        later = (self.output_tokens or 0) - 1
        if later < 1 or not self.streamed or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / later

    def tokens_by_arrival(self) -> list[int]:
        """Tokens of each arrival, spread evenly if the server counts only at the end."""
        total, number = self.output_tokens or 0, len(self.arrivals)
        so_far = list(self.counts)
        if len(so_far) != number:
            so_far = [total * (place + 1) // number for place in range(number)]
        return [now - before for before, now in zip([0, *so_far], so_far, strict=False)]

    def itls(self) -> list[float]:
        """Seconds between tokens; tokens of one arrival share the time since the last one."""
        found: list[float] = []
        if not self.streamed or not self.arrivals:
            return found
        last = self.arrivals[0]
        for time, tokens in list(zip(self.arrivals, self.tokens_by_arrival(), strict=True))[1:]:
            if tokens > 0:
                found += [(time - last) / tokens] * tokens
                last = time
        return found
