"""Who gives which values, where a run has several critics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlmq
from rlmq.common.algorithms import algorithm_of
from rlmq.common.critics import critic_heads, learners, mean_values
from rlmq.common.errors import UsageError
from rlmq.common.flow import flow_of
from rlmq.common.recipe.schema import Recipe
from rlmq.controller.commands import threads
from rlmq.run import Run

REWARD = ({"function": "r.py:f"}, {"function": "r.py:g", "objective": "cost"})


def recipe(*critics: dict[str, object], name: str = "safe_rlhf") -> Recipe:
    reward = REWARD if name == "safe_rlhf" else REWARD[:1]
    data, train = {"train": "t.jsonl"}, {"steps": 1}
    values = {"run": {"name": "t"}, "model": "m", "data": data, "train": train, "critics": critics}
    return Recipe.model_validate({**values, "reward": reward, "algorithm": {"name": name}})


def test_values_of_one_role_are_its_own_and_the_others_the_critics() -> None:
    found = recipe({"name": "harm", "learns": "cost_values", "workers": 2, "threads": 3})
    # then the flow has both, and the actor waits for what either writes
    nodes = {node.name: node for node in flow_of(found)}
    assert [column.name for column in nodes["harm"].writes] == ["cost_values"]
    assert [column.name for column in nodes["critic"].writes] == ["values"]
    assert {"values", "cost_values"} <= set(nodes["actor"].needs)
    assert (found.workers()["harm"], found.workers()["critic"], threads(found, "harm")) == (2, 1, 3)
    assert learners(found) == ("critic", "harm")


def test_several_of_the_same_values_have_columns_of_their_own_and_their_mean_counts() -> None:
    found = recipe({"name": "a"}, {"name": "b"}, name="ppo")
    assert critic_heads(found, algorithm_of(found).critics) == {
        "a": {"values.a": "values"},
        "b": {"values.b": "values"},
    }
    nodes = {node.name: node for node in flow_of(found)}
    assert "critic" not in nodes
    assert {"values.a", "values.b"} <= set(nodes["actor"].needs) and "values" not in nodes["actor"].needs
    [mean] = mean_values([[np.array([1.0, 3.0])], [np.array([2.0, 5.0])]])
    assert mean.tolist() == [1.5, 4.0]


@pytest.mark.parametrize(
    ("critics", "name", "told"),
    [
        (({"name": "a", "learns": "worth"},), "ppo", "'worth'"),
        (({"name": "a"},), "grpo", "no critics"),
        (({"name": "a"}, {"name": "a"}), "ppo", "'a'"),
        (({"name": "critic"},), "ppo", "'critic'"),
        (({"name": "rollout"},), "ppo", "'rollout'"),
        (({"name": "actor"},), "ppo", "'actor'"),
    ],
)
def test_what_fits_no_algorithm_or_role_is_refused(critics: tuple[dict[str, object]], name: str, told: str) -> None:
    with pytest.raises(UsageError, match="critics") as caught:
        flow_of(recipe(*critics, name=name))
    assert told in str(caught.value)


def test_a_critic_with_a_name_is_an_item_of_the_recipe_that_a_script_writes() -> None:
    run: Run = rlmq.Run("named")
    actor = run.actor("model")
    critics = [
        run.critic("model", lr=0.1),
        run.critic("other", name="harm", learns="cost_values", lr=0.2, workers=2),
    ]
    prompts = run.prompts("p.jsonl", per_step=2)

    def loop() -> None:
        for _ in run.steps(1):
            batch = prompts.next()
            for one in [*(critic.update(batch, epochs=3) for critic in critics), actor.update(batch)]:
                one.wait()

    # then
    written = run.recipe(loop, Path("named.py"))
    harm = {"name": "harm", "model": "other", "learns": "cost_values", "lr": 0.2, "workers": 2, "epochs": 3}
    assert (written["critic"], written["critics"]) == ({"lr": 0.1, "epochs": 3}, [harm])
