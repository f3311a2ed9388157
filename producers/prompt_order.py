"""Which prompts a step gets: a pure function of the data's size, the recipe and the step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Every prompt once per pass over the data, each pass in a new seeded order (or all in file order).

    A step takes the next `per_step` prompts; where a pass does not divide, the batch is filled from the
    next pass. With `passes`, the last batch of the last pass is short and ends the run.

    Example:
        >>> order = PromptOrder(count=5, per_step=2, seed=0, shuffle=False, passes=1)
        >>> [order.step_prompts(step) for step in (1, 2, 3, 4)], order.total_steps()
        ([[0, 1], [2, 3], [4], []], 3)
    """

    count: int
    per_step: int
    seed: int
    shuffle: bool = True
    passes: int | None = None

    def total_steps(self) -> int | None:
        """Steps until the data's passes are over; None when they have no end."""
        return None if self.passes is None else -(-self.count * self.passes // self.per_step)

    def step_prompts(self, step: int) -> list[int]:
        """Indices of the prompts of a step (from 1); empty after the last pass."""
        return self.prompts_at((step - 1) * self.per_step, self.per_step)

    def total_prompts(self) -> int | None:
        """Prompts of all passes; None when they have no end."""
        return None if self.passes is None else self.count * self.passes

    def prompts_at(self, first: int, count: int) -> list[int]:
        """Indices of `count` prompts from place `first` of the order on; fewer at the end of the last pass."""
        total = self.total_prompts()
        end = first + count if total is None else min(first + count, total)
        return [self._index(position) for position in range(first, end)]

    def _index(self, position: int) -> int:
        dataset_pass, place = divmod(position, self.count)
        return _permutation(self.seed, dataset_pass, self.count)[place] if self.shuffle else place


@dataclass(frozen=True, slots=True)
class MixedOrder:
    """Prompts of several sets, drawn by weights that change on the way (a curriculum).

    Each place adds its weights to the sets' credits and takes the set with most credit, which pays 1: every set is
    taken as often as the weights say, to within the number of sets. Each set has its own order and passes. A set's
    indices follow those of the sets before it.

    Attributes:
        sets: order of each set by name.
        mixture: `(place from which they hold, weight by name)`, the first from place 0.
    """

    sets: Mapping[str, PromptOrder]
    mixture: Sequence[tuple[int, Mapping[str, float]]]
    _taken: list[int] = field(default_factory=list, repr=False)
    _credit: dict[str, float] = field(default_factory=dict, repr=False)
    _used: dict[str, int] = field(default_factory=dict, repr=False)

    def total_steps(self) -> None:
        """There is no end."""

    def total_prompts(self) -> None:
        """There is no end."""

    def prompts_at(self, first: int, count: int) -> list[int]:
        """Indices of `count` prompts from place `first` on."""
        while len(self._taken) < first + count:
            self._take(len(self._taken))
        return self._taken[first : first + count]

    def _take(self, place: int) -> None:
        weights = next(weights for start, weights in reversed(self.mixture) if start <= place)
        whole = sum(weights.values())
        for name in self.sets:
            self._credit[name] = self._credit.get(name, 0.0) + weights.get(name, 0.0) / whole
        chosen = max((name for name in self.sets if weights.get(name, 0.0) > 0), key=self._credit.__getitem__)
        self._credit[chosen] -= 1.0
        used = self._used.get(chosen, 0)
        self._used[chosen] = used + 1
        before = 0
        for name, order in self.sets.items():
            if name == chosen:
                self._taken.extend(before + index for index in order.prompts_at(used, 1))
                return
            before += order.count


@lru_cache(maxsize=16)
def _permutation(seed: int, dataset_pass: int, count: int) -> tuple[int, ...]:
    """Sorted by hash: the same in every process, Python version and platform."""

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{dataset_pass}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(count), key=key))
