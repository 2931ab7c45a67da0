"""The part of the KV cache that a rank holds."""

from __future__ import annotations

from moesaic.core.disagg import KVShare
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.layers.attention import Attention, Heads


def kv_share(runner: ModelRunner) -> KVShare:
    parallel, spec = runner.parallel, runner.model.cache
    assert parallel.layers is not None
    heads = range(spec.num_heads)
    attention = next((m for m in runner.model.modules() if isinstance(m, Attention)), None)
    if attention is not None:  # latents are whole on every rank
        group = parallel.attention
        heads = Heads.of(attention.config, group.rank, group.size).kv
    layers = parallel.layers.start, parallel.layers.stop
    return KVShare(layers, (heads.start, heads.stop), spec.key_dim, spec.value_dim)
