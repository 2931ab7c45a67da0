"""Where the weights of a rank come from when they are not in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moesaic.config import ServerArgs
from moesaic.models.blocks import CausalLM
from moesaic.models.schemes import Scheme
from moesaic.models.skewed_routers import skew_routers
from moesaic.models.weights import (
    fill_randomly,
    fill_some_randomly,
    load_some_weights,
    load_weights,
)


@dataclass(frozen=True)
class WeightSource:
    """Reads the checkpoint of a model, or makes random weights (--load-format dummy)."""

    args: ServerArgs
    scheme: Scheme

    @property
    def is_random(self) -> bool:
        return self.args.load_format == "dummy"

    @property
    def folder(self) -> Path:
        return Path(self.args.model_path)

    @property
    def name(self) -> str:
        return "random numbers" if self.is_random else f"the checkpoint {self.folder}"

    @property
    def _seed(self) -> int:
        return self.args.random_seed or 0

    def fill(self, model: CausalLM) -> None:
        """All weights of this rank's part of the model."""
        if not self.is_random:
            load_weights(model, self.folder, self.scheme)
            return
        fill_randomly(model, self._seed)
        if self.args.dummy_router_zipf is not None:
            skew_routers(model, self.args.dummy_router_zipf, self._seed)

    def fill_some(self, model: CausalLM, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Only the experts' weights in `tensors`, parts of the model's own, one for each item."""
        if self.is_random:
            return fill_some_randomly(model, self._seed, tensors)
        return load_some_weights(model, self.folder, self.scheme, tensors)
