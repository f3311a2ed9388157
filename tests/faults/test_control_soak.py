"""Fault 35: two hundred restarts of random workers leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest
from faults.echo import Echo

pytestmark = pytest.mark.timeout(1200)
ROLES = {"prompts": 1, "rollout": 2, "reward": 2, "actor": 1, "recorder": 1}
RESTARTS = int(os.environ.get("RLMQ_RESTARTS", "200"))


class Workers:
    """The workers of a run, started by hand and started again when they end."""

    def __init__(self, run) -> None:
        self._run = run
        self.places = [(role, index) for role, count in ROLES.items() for index in range(count)]
        self.processes = {place: self._start(*place) for place in self.places}
        self.restarts = 0

    def _start(self, role, index):
        return self._run.command_of("worker", role, "--index", str(index))

    def restart(self, place) -> None:
        """`kill -9`, and a new process."""
        self.processes[place].kill()
        self.processes[place].wait()
        self.processes[place] = self._start(*place)
        self.restarts += 1

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def _look(client, controller):
    """What must not grow: the least of several looks, since rows come and go."""
    process = psutil.Process(controller)
    looks = []
    for _ in range(40):
        facts = {"fds": process.num_fds(), "threads": process.num_threads(), "memory": process.memory_info().rss}
        looks.append(facts | {"keys": client.dbsize(), "used": client.info("memory")["used_memory"]})
        time.sleep(0.05)
    return {name: min(look[name] for look in looks) for name in looks[0]}


def test_many_steps_leave_memory_and_keys_at_their_base_line(echo, server):
    """Every sample is accounted for, and nothing of the older steps is held."""
    run = echo(f"redis.url={server.url}", "checkpoint.every_steps=1", steps=60, echo=Echo(work_s={"rollout": 0.1}))
    run.until_step(6)
    controller = run.processes()["controller-0"]
    with server.client() as client:
        base = _look(client, controller)
        run.until_step(45)
        now = _look(client, controller)
    print(f"base line {base}, 40 steps later {now}")
    assert now["keys"] <= base["keys"] + 24
    assert now["used"] < base["used"] + 2_000_000
    assert now["memory"] < 1.3 * base["memory"]
    run.check()


@pytest.mark.faults_long
def test_restarts_leave_files_memory_and_keys_at_their_base_line(echo, rng, server):
    """Random workers are killed while the run goes on, one after the other."""
    run = echo(
        f"redis.url={server.url}", "checkpoint.every_steps=1", steps=100_000, echo=Echo(work_s={"rollout": 0.1})
    )
    run.until_step(4)
    run.up.kill()  # its folder and its records stay; from here on the processes are started by hand
    run.up.wait()
    controller = run.command_of("controller")
    workers = Workers(run)
    try:
        with server.client() as client:
            trained = _await_steps(run, workers, 6)
            base = _look(client, controller.pid)
            while workers.restarts < RESTARTS:
                workers.restart(rng.choice(workers.places))
                time.sleep(rng.uniform(0.0, 1.0))
                assert controller.poll() is None
                if workers.restarts % 20 == 0:
                    trained = _await_steps(run, workers, trained + 3)
            _await_steps(run, workers, trained + 6)
            now = _look(client, controller.pid)
        print(f"base line {base}, after {workers.restarts} restarts {now}")
        assert now["fds"] <= base["fds"] + 4
        assert now["threads"] <= base["threads"] + 2
        assert now["keys"] <= base["keys"] + 24
        assert now["memory"] < 1.5 * base["memory"]
        assert now["used"] < base["used"] + 2000 * (run.trained + 100)  # results of calls are kept for the run
    finally:
        controller.send_signal(signal.SIGTERM)
        with suppress(Exception):
            controller.wait(30)
        controller.kill()
        controller.wait()
        workers.close()


def _await_steps(run, workers, step):
    """Wait until a step is trained; workers that ended otherwise are started again. Returns the newest step."""
    deadline = time.monotonic() + 120
    while run.trained < step:
        assert time.monotonic() < deadline, run.state()
        for place, process in list(workers.processes.items()):
            if process.poll() is not None:
                workers.restart(place)
        time.sleep(0.2)
    return run.trained
