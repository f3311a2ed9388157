"""Metrics as sums: merged over micro-batches and ranks first, divided once at the end.

A mean of means depends on how rows were split; sums do not. Keys ending in `_max` merge by the maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_COUNTS = ("tokens", "rows", "pairs")
_PER_PAIR = "_per_pair"


def merge_sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metric sums of all parts (micro-batches, ranks) together."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
    return total


def metric_means(sums: Mapping[str, float], denominators: Iterable[float]) -> dict[str, float]:
    """Metrics of a step from its *global* sums.

    `loss` is divided by the loss's denominators, `NAME_per_pair` by `pairs` (and is called `NAME` then), every
    other sum by `tokens`; `tokens`, `rows`, `pairs` and `_max` keys stay as they are.
    """
    tokens = max(1.0, sums.get("tokens", 0.0))
    scale = 1.0
    for denominator in denominators:
        scale *= denominator
    means: dict[str, float] = {}
    for name, value in sums.items():
        if name in _COUNTS or name.endswith("_max"):
            means[name] = value
        elif name.endswith(_PER_PAIR):
            means[name.removesuffix(_PER_PAIR)] = value / max(1.0, sums["pairs"])
        else:
            means[name] = value / (scale if name == "loss" else tokens)
    return means
