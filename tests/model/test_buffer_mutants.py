"""The state machine notices each fault of `mutants.py`, by the invariant that is named there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from model import invariants, mutants
from model.machine import BufferMachine


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=[m.name for m in mutants.MUTANTS])
def test_a_planted_fault_is_noticed(machine_url, mutant):
    with mutants.planted(mutant) as module:
        space = {"url": machine_url, "store_class": module.RedisStore, "fixed": mutant.dimensions}
        machine = type(f"Machine_{mutant.name}", (BufferMachine,), space)
        with pytest.raises(invariants.Broken) as raised:
            run_state_machine_as_test(machine, settings=settings.get_profile("mutants"))
    assert raised.value.invariant in mutant.killed_by, str(raised.value)


def test_a_mutant_of_another_source_is_stale():
    mutant = mutants.MUTANTS[0]
    with pytest.raises(mutants.Stale, match=r"double_ack: runs\.lua has 0 times"):
        mutant.mutated("-- rewritten")


def test_the_readme_lists_the_mutants():
    assert mutants.table() in mutants.README.read_text(encoding="utf-8")
