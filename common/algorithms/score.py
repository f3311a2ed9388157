"""No training: prompts are answered and scored once, as an evaluation; rows end as `done`.

This is what a flow script runs. There is no actor: rollout workers serve the model of the recipe as version 0.
"""

from __future__ import annotations

from rlmq.common.algorithms.algorithm import Spec, Steering
from rlmq.common.algorithms.policy_gradient import PolicyGradient


class Score(PolicyGradient):
    """Generates and scores the evaluation sets."""

    @property
    def needs(self) -> tuple[str, ...]:
        """None: there is no actor."""
        return ()

    def loop(self, run: Steering) -> None:
        """One evaluation with the weights that the rollout workers began with."""
        run.publish(0)
        run.evaluate(0)


SPEC = Spec(
    "No training: the evaluation sets are generated and scored once.",
    Score,
    preset={"group_size": 1},
    keys=frozenset(),
)
