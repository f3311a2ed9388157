"""A run declared in Python: the recipe that its script writes, and what its loop may not do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlmq
from rlmq.algorithms import gae, kl_penalty
from rlmq.common.errors import ControlLoopDiverged, UsageError
from rlmq.common.recipe.load import code_hash, load_recipe
from rlmq.handles import Actor, Prompts
from rlmq.run import Run

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PPO = RECIPES.parent / "docs" / "tutorials" / "ppo.py"


def declared() -> tuple[Run, Actor, Prompts]:
    run = rlmq.Run("declared", seed=3)
    return run, run.actor("model", lr=1e-3), run.prompts("p.jsonl", per_step=2)


def test_the_ppo_script_is_a_recipe() -> None:
    # when
    loaded = load_recipe(PPO, ["train.steps=2"])
    # then declarations and what the loop tells its handles are settings, and overrides count last
    recipe = loaded.recipe
    block = recipe.algorithm
    assert (block.name, block.kl_coef, block.kl_in, block.gamma, block.lam) == ("ppo", 0.01, "reward", 1.0, 0.95)
    assert block.loop == "ppo.py:__main__"
    assert (block.clip, recipe.train.epochs, recipe.critic.epochs) == ((0.2, 0.2), 2, 2)
    assert (recipe.train.steps, recipe.train.lr, recipe.critic.lr) == (2, 5e-3, 1e-2)
    assert recipe.rollout.max_response_tokens == 16
    assert set(recipe.workers()) == {"prompts", "rollout", "reward", "reference", "critic", "actor", "recorder"}


def test_an_edit_of_the_script_changes_the_hash_of_the_handshake(tmp_path: Path) -> None:
    # given
    script = tmp_path / "mine.py"
    script.write_text((PPO).read_text())
    recipe = load_recipe(script).recipe
    before = code_hash(recipe, tmp_path)
    # when
    script.write_text(script.read_text() + "# edited\n")
    # then
    assert code_hash(recipe, tmp_path) != before


def test_ppo_is_26_lines() -> None:
    tree = ast.parse((PPO).read_text())
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr)}
    assert len(lines) <= 26


@pytest.mark.parametrize("name", ["reuse", "delayed", "second_score"])
def test_each_loop_is_ten_lines_and_a_valid_recipe(name: str) -> None:
    file = RECIPES / "loops" / f"{name}.py"
    [loop] = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno < 10
    assert load_recipe(file).recipe.algorithm.loop == f"{name}.py:__main__"


def test_a_second_round_of_scores_has_a_column_of_its_own() -> None:
    assert load_recipe(RECIPES / "loops" / "second_score.py").recipe.reward_names == ("letters", "again")


def test_settings_may_not_change_from_step_to_step() -> None:
    # given
    run, actor, prompts = declared()

    def loop() -> None:
        for step in run.steps(3):
            actor.update(actor.generate(prompts.next(), max_tokens=4), epochs=step)

    # then
    with pytest.raises(ControlLoopDiverged, match=r"train\.epochs in step 2 .*got 2, expected 1"):
        run.recipe(loop, Path("x.py"))


def test_a_step_without_an_update_is_refused() -> None:
    run, actor, prompts = declared()

    def loop() -> None:
        for _ in run.steps(3):
            actor.generate(prompts.next())

    with pytest.raises(UsageError, match=r"step 1 .*no update"):
        run.recipe(loop, Path("x.py"))


def test_rows_of_another_step_are_refused() -> None:
    run, actor, prompts = declared()

    def loop() -> None:
        old = None
        for _ in run.steps(2):
            batch = actor.generate(prompts.next())
            old = old or batch
            actor.update(old)

    with pytest.raises(UsageError, match="batch of step 1"):
        run.recipe(loop, Path("x.py"))


def test_an_update_after_the_step_is_trained_is_refused() -> None:
    run, actor, prompts = declared()
    critic = run.critic()

    def loop() -> None:
        for _ in run.steps(1):
            batch = actor.generate(prompts.next()).map(gae()).map(kl_penalty(0.1))
            critic.update(batch).wait()
            actor.update(batch, loss="ppo")

    with pytest.raises(UsageError, match="a step that is trained"):
        run.recipe(loop, Path("x.py"))


def test_a_handle_outside_of_the_loop_is_refused() -> None:
    run, actor, prompts = declared()
    with pytest.raises(UsageError, match="outside"):
        actor.generate(prompts.next())
    with pytest.raises(UsageError, match="outside of the loop"):
        run.evaluate()


def test_a_script_that_declares_nothing_is_told(tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text("print('hello')\n")
    with pytest.raises(UsageError, match="no declared run"):
        load_recipe(script)
    script.write_text("raise ValueError('mine')\n")
    with pytest.raises(UsageError, match="ValueError: mine"):
        load_recipe(script)


def test_rlmq_imports_no_torch_and_none_of_this() -> None:
    code = "import rlmq, sys; assert not {'torch', 'rlmq.run', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))
