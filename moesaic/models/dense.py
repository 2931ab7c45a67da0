"""Which projections of a model stay in float8. Embedding, head, routers and norms never do."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass

from moesaic.layers.linear import Linear, linears
from moesaic.layers.module import Module
from moesaic.moe.quant.weights import WeightFormat

logger = logging.getLogger(__name__)

FP8_FORMATS = ("fp8_block", "fp8_channel", "fp8_tensor")
# kv_b_proj is used per head in the model's type (MLA); shared_expert_gate has a single row.
NEVER_QUANTISED = re.compile(r"\.(kv_b_proj|shared_expert_gate)\.weight$")


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Keeps projections in `format` if all their matrices are in `names` (None: any)."""

    format: WeightFormat
    names: frozenset[str] | None = None

    def apply(self, model: Module) -> None:
        """Call it before weights are loaded: other projections are decoded at load."""
        stay: Counter[tuple[str, str]] = Counter()
        kept = 0
        for prefix, linear in linears(model):
            reason = self._reason(prefix, linear)
            if reason is None:
                linear.use_format(self.format)
                kept += 1
            elif reason:
                stay[prefix.rstrip(".").rpartition(".")[2], reason] += 1
        if any(parameter.is_meta for parameter in model.parameters()):
            return
        logger.info("dense: %d projections are kept as %s", kept, self.format.name)
        for (name, reason), count in stay.items():
            logger.info("dense: %d of %s stay unquantised: %s", count, name, reason)

    def _reason(self, prefix: str, linear: Linear) -> str | None:
        """Why a projection does not stay in the format: None if it does, empty if expected."""
        names = linear.matrix_names(prefix)
        if any(map(NEVER_QUANTISED.search, names)):
            return ""
        if self.names is not None and not self.names.issuperset(names):
            some = not self.names.isdisjoint(names)
            return "the checkpoint has quantised only some of its parts" if some else ""
        return linear.unsupported_reason(self.format) or None
