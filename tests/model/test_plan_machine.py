"""Whatever reports, workers, servers and controllers do, the plan keeps its promises."""

from __future__ import annotations

import os
import secrets

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from model import mutants, plan_mutants
from model.plan_machine import PlanMachine
from model.plan_world import INVARIANTS, Broken

WALK = settings(settings.get_profile("machine"), max_examples=150, stateful_step_count=50)


@pytest.mark.timeout(300)
def test_the_plan_keeps_its_promises():
    machine = type("Machine", (PlanMachine,), {})
    number = int(os.environ.get("RLMQ_MODEL_SEED", secrets.randbelow(2**32)))
    walk = settings(WALK, derandomize=False, database=None, print_blob=True)
    if "RLMQ_MODEL_EXAMPLES" in os.environ:
        print(f"RLMQ_MODEL_SEED={number}")
        walk = settings(walk, max_examples=int(os.environ["RLMQ_MODEL_EXAMPLES"]))
        seed(number)(machine)
    else:
        walk = settings(walk, derandomize=True)
    run_state_machine_as_test(machine, settings=walk)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutant", plan_mutants.MUTANTS, ids=[m.name for m in plan_mutants.MUTANTS])
def test_a_planted_fault_in_the_plan_is_noticed(mutant):
    machine = type(f"Machine_{mutant.name}", (PlanMachine,), {"plan": plan_mutants.planted(mutant)})
    walk = settings(WALK, derandomize=True, max_examples=400, phases=[Phase.generate])
    with pytest.raises(Broken) as raised:
        run_state_machine_as_test(machine, settings=walk)
    assert raised.value.invariant in mutant.killed_by, str(raised.value)


def test_the_readme_lists_what_the_plan_keeps():
    text = mutants.README.read_text(encoding="utf-8")
    assert plan_mutants.table() in text
    assert all(f"| `{name}` | {words} |" in text for name, words in INVARIANTS.items())
