"""The parts of KV caches that a rank holds, of those that instances send each other."""

from __future__ import annotations

from torch import nn

from moesaic.core.disagg import KVShare
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.speculate.eagle import EagleDraft
from moesaic.engine.speculate.nextn import NextNDraft
from moesaic.layers.attention import Attention, Heads
from moesaic.layers.context import CacheSpec


def kv_shares(runner: ModelRunner) -> tuple[KVShare, ...]:
    """As ModelRunner.sent_caches."""
    layers, model = runner.parallel.layers, runner.model
    assert layers is not None
    found = [_share(runner, model, model.cache, layers)]
    if runner.draft is not None and runner.draft.model.reads_target:
        draft = runner.draft.model
        assert isinstance(draft, NextNDraft | EagleDraft), "they read hidden states of the target"
        found.append(_share(runner, draft.net, draft.cache, range(draft.cache.num_layers)))
    return tuple(found)


def _share(runner: ModelRunner, net: nn.Module, spec: CacheSpec, layers: range) -> KVShare:
    heads = range(spec.num_heads)
    attention = next((m for m in net.modules() if isinstance(m, Attention)), None)
    if attention is not None:  # latents are whole on every rank
        group = runner.parallel.attention
        heads = Heads.of(attention.config, group.rank, group.size).kv
    extent = (layers.start, layers.stop), (heads.start, heads.stop)
    return KVShare(*extent, spec.key_dim, spec.value_dim)
