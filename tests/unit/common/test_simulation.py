"""Discrete events against times that can be told without them."""

from __future__ import annotations

import random

import pytest

from rlmq.common.errors import UsageError
from rlmq.common.simulation import Arm, Costs, best, simulate

pytestmark = pytest.mark.timeout(60)

COSTS = Costs(iteration_s=1.0, active_s=0.0, token_s=1.0, most_active=4)


def test_in_turn_a_step_is_its_longest_response_and_then_its_tokens() -> None:
    # given two devices that generate and then train, and steps of 4 responses
    steps = [[3, 5, 2, 6], [1, 1, 1, 9]]
    found = simulate(steps, Arm(0, 2, 2, shared=True), COSTS)
    # then a step takes as many iterations as its longest response, and half of its tokens
    assert found.ends == pytest.approx((6 + 16 / 2, 6 + 16 / 2 + 9 + 12 / 2))
    assert found.staleness == 0


def test_an_iteration_is_longer_the_more_responses_are_active() -> None:
    costs = Costs(iteration_s=1.0, active_s=0.5, token_s=1.0, most_active=4)
    # two are active for 2 iterations of 2 s, then one for 3 of 1.5 s; training 7 s
    assert simulate([[2, 5]], Arm(0, 1, 1, shared=True), costs).ends == pytest.approx((2 * 2 + 3 * 1.5 + 7,))


def test_a_free_slot_takes_the_next_response() -> None:
    costs = Costs(iteration_s=1.0, active_s=0.0, token_s=1.0, most_active=1)
    assert simulate([[2, 5, 3]], Arm(0, 1, 10, shared=True), costs).ends == pytest.approx((10 + 1.0,))


def test_ahead_a_step_takes_its_share_of_the_way_or_what_the_slower_side_needs() -> None:
    # given equal responses of 10 tokens, room for all that are in flight, and training that takes 8 s
    steps, costs = [[10] * 4] * 14, Costs(iteration_s=1.0, active_s=0.0, token_s=1.0, most_active=16)
    # then one step ahead, two steps share the way of one: 10 s of generation and 8 s of training
    assert simulate(steps, Arm(1, 1, 5, interrupts=True), costs).step_s == pytest.approx((10 + 8) / 2)
    # further ahead, training never waits
    found = simulate(steps, Arm(3, 1, 5, interrupts=True), costs)
    assert (found.step_s, found.busy[1]) == pytest.approx((8.0, 1.0))
    # and where a device has room for one step only, generating is what counts
    assert simulate(steps, Arm(3, 1, 5, interrupts=True), COSTS).step_s == pytest.approx(10.0)


def test_without_interruption_weights_wait_for_the_longest_response() -> None:
    steps = [[2, 2, 2, 20]] * 10
    waits, goes_on = (simulate(steps, Arm(2, 1, 26, interrupts=one), COSTS) for one in (False, True))
    assert goes_on.step_s < waits.step_s


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_row_is_within_the_bound_and_no_step_is_faster_than_its_work(ahead: int) -> None:
    draw = random.Random(ahead)
    steps = [[draw.randint(1, 50) for _ in range(16)] for _ in range(8)]
    found = best(steps, 4, COSTS, ahead, interrupts=True)
    arm = found.arm
    assert len(found.ends) == 8
    assert 0 <= found.staleness <= ahead
    assert found.ends[-1] >= sum(sum(one) for one in steps) / arm.training
    assert all(0 <= share <= 1 + 1e-9 for share in found.busy)


def test_what_cannot_be_simulated_is_refused() -> None:
    for steps, arm in (
        ([], Arm(0, 1, 1)),
        ([[]], Arm(0, 1, 1)),
        ([[1]], Arm(0, 0, 1)),
        ([[1]], Arm(1, 1, 1, shared=True)),
    ):
        with pytest.raises(UsageError):
            simulate(steps, arm, COSTS)
