"""Where a trainer that learns beside the actor goes on."""

from __future__ import annotations

from collections.abc import Iterator

from rlmq.buffer.batch_log import BatchEntry
from rlmq.consumers.logged_trainer import last_kept

LOG = [
    BatchEntry(step=n, policy_version=n, rows=(), ranges=(), updates=(), behaviour_versions=(0, 0), seed=0)
    for n in range(1, 6)
]


def entries(after: int) -> Iterator[BatchEntry]:
    return (entry for entry in LOG if entry.step > after)


def test_it_goes_on_after_the_last_logged_step_whose_rows_are_held() -> None:
    assert last_kept(lambda: 2, entries, lambda entry: entry.step <= 4) == 4
    assert last_kept(lambda: 2, entries, lambda _: True) == 5
    assert last_kept(lambda: 0, lambda _: iter(()), lambda _: True) == 0


def test_rows_that_the_actor_lets_go_of_meanwhile_are_not_lost() -> None:
    # given an actor that commits step 3 and lets go of its rows between the two looks
    looks = iter([2, 3, 3])

    def held(entry: BatchEntry) -> bool:
        return entry.step > 3

    # then steps after it stay as well
    assert last_kept(lambda: next(looks), entries, held) == 5
