"""Who sends what: demands spread over those who can serve them, so that the busiest sends as little as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SWEEPS = 60
_STILL = 0.002  # of the busiest load: a sweep that changes less ends the search

Holders = tuple[int, ...]


def shares(demands: Mapping[Holders, float]) -> dict[Holders, list[float]]:
    """For each set of holders, how much of its demand each of them serves.

    Sweep over the sets, each time spreading one demand over its holders as water fills a vessel, given all others.
    This descends on the sum of squared loads, block by block, which is convex: its minimum over such assignments
    also has the least largest load (Fujishige 1980: the least-squares point of a base polytope is the
    lexicographically optimal one).
    """
    loads: dict[int, float] = {}
    result = {holders: [0.0] * len(holders) for holders in demands}
    shared = sorted(demands, key=lambda one: (len(one), one))
    for sweep in range(_SWEEPS):
        moved = 0.0
        for holders in shared:
            old = result[holders]
            others = [loads.get(rank, 0.0) - given for rank, given in zip(holders, old, strict=True)]
            new = _fill(others, demands[holders])
            result[holders] = new
            for rank, other, given in zip(holders, others, new, strict=True):
                moved = max(moved, abs(other + given - loads.get(rank, 0.0)))
                loads[rank] = other + given
        if sweep and moved <= _STILL * max(loads.values(), default=0.0):
            break
        shared = [holders for holders in shared if len(holders) > 1]
    return result


def _fill(base: Sequence[float], amount: float) -> list[float]:
    """Parts of `amount` that bring the lowest of `base` to one level."""
    order = sorted(base)
    below = 0.0
    level = 0.0
    for count, height in enumerate(order, start=1):
        below += height
        level = (amount + below) / count
        if count == len(order) or level <= order[count]:
            break
    parts = [max(0.0, level - height) for height in base]
    return parts
