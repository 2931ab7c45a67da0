"""The values of /metrics, and distributions to compare with."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from moesaic.observe.requests import Distribution, Histogram

Values = dict[str, dict[tuple[str, ...], float]]


def parsed(text: str) -> Values:
    """By the names of samples, by the values of their labels in the table's order."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def histogram(*values: float) -> Distribution:
    found = Histogram((1.0, 2.0, 4.0))
    for value in values:
        found.add(value)
    return found.copy()
