"""Random verbs from several clients agree with a plain model of the buffer."""

from __future__ import annotations

import os
import secrets

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from model.machine import BufferMachine
from model.tables import DIMENSIONS, batch_of, table_of

from rlmq.buffer.redis_store import RedisStore


@pytest.mark.timeout(600)  # a failure of a random walk is shrunk for up to 5 minutes
def test_random_verbs_agree_with_the_model(machine_url):
    machine = type("Machine", (BufferMachine,), {"url": machine_url})
    if not settings.get_profile("machine").derandomize:
        number = int(os.environ.get("RLMQ_MODEL_SEED", secrets.randbelow(2**32)))
        print(f"RLMQ_MODEL_SEED={number}")
        seed(number)(machine)
    run_state_machine_as_test(machine, settings=settings.get_profile("machine"))


def test_the_model_holds_through_restarts_of_the_server(lasting_server):
    machine = type("Machine", (BufferMachine,), {"url": lasting_server.url, "server": lasting_server})
    run_state_machine_as_test(machine, settings=settings.get_profile("restarts"))


@pytest.mark.parametrize("selector", ["uniform", "prioritized"])
def test_a_run_repeats_its_own_draws(machine_url, selector):
    dimensions = {name: values[0] for name, values in DIMENSIONS.items()} | {
        "end_selector": selector,
        "end_scope": "row",
    }

    def draws(run_id: str, number: int) -> list[int]:
        store = RedisStore(machine_url, run_id=f"{run_id}-{selector}", worker="w")
        store.open([table_of(dimensions, seed=number)])
        columns = {name: list(range(16)) for name in ("x", "y", "y2", "z")}
        store.put("train", batch_of(columns), producer="p", sequence=0, group_size=1)
        claims = [store.claim("train", "end", max_rows=1, columns=["x"]) for _ in range(16)]
        store.close()
        return [claim.rows["x"][0].as_py() for claim in claims]

    first = draws("one", 7)
    assert draws("two", 7) == first
    assert draws("three", 8) != first
    assert sorted(first) == list(range(16))
