"""Dumps of the expert distribution recorder, compared with what transformers' routers choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic import Engine
from moesaic.balance.files import read_loads
from moesaic.models.tiny import materialise
from tests.oracle import Oracle, load

GREEDY = {"temperature": 0, "ignore_eos": True}
Dump = dict[str, Any]


@cache
def oracle_of(model: str) -> Oracle:
    return Oracle(load(Path(materialise(model))))


def record(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Records the passes of these prompts; the computed tokens of each sequence."""
    engine.flush_cache()  # or else tokens are found there and not computed
    engine.start_expert_distribution_record()
    outputs = engine.generate(
        input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": new_tokens}
    )
    engine.stop_expert_distribution_record()
    assert isinstance(outputs, list)
    return [[*prompt, *out["output_ids"]] for prompt, out in zip(prompts, outputs, strict=True)]


def expected_counts(oracle: Oracle, sequences: Sequence[list[int]], experts: int) -> Any:
    """Tokens [layers, experts] of all sequences; the last of each is not computed. Routers of
    transformers have no ids for layers without one, where the dump has zeros."""
    layers = oracle.model.config.num_hidden_layers
    counts = np.zeros((layers, experts), np.int64)
    for ids in sequences:
        routed = oracle.routed(ids)[:-1]
        for layer in oracle._choices:
            counts[layer] += np.bincount(routed[:, layer].flatten(), minlength=experts)
    return counts


def check_counts(found: Dump, oracle: Oracle, sequences: Sequence[list[int]], folder: Path) -> None:
    """Of a dump in its own folder."""
    path = folder if len(found["files"]) > 1 else Path(found["files"][0])
    loads = read_loads(path)
    assert loads.shape[0] == found["passes"] > 0 and found["passes_lost"] == 0
    expected = expected_counts(oracle, sequences, loads.shape[2])
    assert loads.sum(0).tolist() == expected.tolist()


def check_counts_of(found: Sequence[Dump], oracle: Oracle, sequences: Sequence[list[int]]) -> None:
    """Of several dumps together, whose placement is trivial: a slot is its expert."""
    contents = [torch.load(path, weights_only=True) for dump in found for path in dump["files"]]
    records = [one["global_physical_count"] for content in contents for one in content["records"]]
    counts_LE = torch.stack(records).sum(0)
    expected = expected_counts(oracle, sequences, counts_LE.shape[1])
    assert counts_LE.tolist() == expected.tolist()


def check_tokens(found: Dump, oracle: Oracle, sequences: Sequence[list[int]]) -> None:
    """Every token is in the records of one rank for each set of layers, with its experts."""
    records = [
        record
        for path in found["files"]
        for record in torch.load(path, weights_only=True)["records"]
    ]
    assert found["tokens_dropped"] == 0 == sum(one["tokens_dropped"] for one in records)
    by_layers: dict[tuple[int, ...], Counter[Any]] = {}
    for one in records:
        experts_LTK = one["topk_ids_of_layer"]
        layers = tuple(n for n, ids in enumerate(experts_LTK) if len(ids) and ids.min() >= 0)
        tokens = by_layers.setdefault(layers, Counter())
        chosen = experts_LTK[list(layers)].sort(-1).values.transpose(0, 1).tolist()
        places = zip(one["input_ids"].tolist(), one["positions"].tolist(), chosen, strict=True)
        tokens.update((token, place, str(ids)) for token, place, ids in places)
    by_layers.pop((), None)
    oracle.routed(sequences[0])
    assert sorted(layer for layers in by_layers for layer in layers) == sorted(oracle._choices)
    for layers, tokens in by_layers.items():
        wanted: Counter[Any] = Counter()
        for ids in sequences:
            chosen = oracle.routed(ids)[:-1, list(layers)].sort(-1).values.tolist()
            wanted.update((ids[n], n, str(experts)) for n, experts in enumerate(chosen))
        assert tokens == wanted
