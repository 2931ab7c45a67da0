"""An emulated link between ranks of one machine: what `--emulate-link` asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

SHAPE: Final = "gbps=50,us=5: gigabytes a second (50 GB/s are 400 Gbit/s), and microseconds"
# Kernels multiply bytes by the time of one, in 2**-20 ns.
COST_BITS: Final = 20
LEAST_GBPS: Final = 0.01


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """Each rank sends `gigabytes` * 1e9 bytes a second, and receives as many at once; what it sends
    arrives `latency_us` after its last byte has left."""

    gigabytes: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not (LEAST_GBPS <= self.gigabytes < math.inf):
            raise ValueError(f"gbps={self.gigabytes:g}: give at least {LEAST_GBPS} ({SHAPE})")
        if not (0 <= self.latency_us <= 1e6):
            raise ValueError(f"us={self.latency_us:g}: give 0 to 1000000 ({SHAPE})")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`gbps=50,us=5`, in any order; `us` may be left out.

        >>> str(EmulatedLink.parse("gbps=50,us=5"))
        '50 GB/s (400 Gbit/s), 5 us'
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key not in ("gbps", "us") or not equals or key in found:
                raise ValueError(f"{text!r} is no link: give {SHAPE}")
            try:
                found[key] = float(value)
            except ValueError:
                raise ValueError(f"{key}={value!r} is no number: give {SHAPE}") from None
        if "gbps" not in found:
            raise ValueError(f"{text!r} has no gbps: give {SHAPE}")
        return cls(found["gbps"], found.get("us", 0.0))

    @property
    def latency_ns(self) -> int:
        return round(1e3 * self.latency_us)

    @property
    def cost(self) -> int:
        """The time of a byte in 2**-20 ns: a gigabyte a second is a byte a nanosecond."""
        return round((1 << COST_BITS) / self.gigabytes)

    def ns(self, nbytes: int) -> int:
        """The seconds for which these bytes occupy the link."""
        return nbytes * self.cost >> COST_BITS

    def __str__(self) -> str:
        gbit = f"{8 * self.gigabytes:g} Gbit/s"
        return f"{self.gigabytes:g} GB/s ({gbit}), {self.latency_us:g} us"
