"""How a run and its processes end: SIGTERM to all, to one, twice; and who is replaced without waiting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlmq.common.control import Death
from rlmq.common.run_folder import RunFolder
from rlmq.controller.records import read_deaths, read_snapshot

pytestmark = pytest.mark.timeout(300)

ROLES = ("prompts", "rollout", "reward", "actor", "recorder")
LONG = ("train.steps=500", "evaluate.every_steps=0", "checkpoint.every_steps=0")


def steps(cli: Any, name: str) -> int:
    found = list((cli.folder / "runs").glob(f"{name}-*/metrics.jsonl"))
    return found[0].read_text().count('"train"') if found else 0


def reach(cli: Any, name: str, step: int) -> Path:
    cli.wait_until(lambda: steps(cli, name) >= step, f"step {step} of {name}", 150.0)
    folder: Path = cli.newest_run(name)
    return folder


def newest_checkpoint(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-??????")), default=0)


def leased(cli: Any, name: str) -> int:
    """Rows that somebody holds, by a run whose server lives on."""
    done = cli.run("buffer", name, "--verify", "--json")
    tables = json.loads(done.out)["tables"]
    assert all(table["broken"] == [] for table in tables), done.out
    return sum(len(stage["leases"]) for table in tables for stage in table["stages"])


def deaths(run: Path, name: str, what: str) -> list[Death]:
    return [death for death in read_deaths(RunFolder(run)) if death.name == name and death.what == what]


def test_sigterm_drains_ends_with_0_and_the_same_command_goes_on(cli: Any, redis_url: str) -> None:
    # given a run in mid-batch, with a server of one's own
    args = ("up", cli.tiny, *LONG, "run.name=drained", f"redis.url={redis_url}", "deadlines.drain_s=60")
    process = cli.start(*args)
    run = reach(cli, "drained", 2)
    # when it is told to end
    process.terminate()
    out, err = process.communicate(timeout=120)
    # then it ends well: everything saved, nothing leased, nobody killed
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    assert "Stopped; the same command goes on." in out
    assert newest_checkpoint(run) >= steps(cli, "drained")
    assert leased(cli, "drained") == 0
    assert not [d for d in read_deaths(RunFolder(run)) if d.what == "killed"]
    assert json.loads((run / "summary.json").read_text())["exit"] == 143
    # and the same command goes on with the next step
    done = steps(cli, "drained")
    again = cli.start(*args)
    reach(cli, "drained", done + 1)
    again.terminate()
    again.communicate(timeout=120)
    assert [line["step"] for line in cli.metrics("drained")] == list(range(1, steps(cli, "drained") + 1))


def test_sigterm_to_every_process_by_hand_ends_each_with_0(cli: Any, redis_url: str) -> None:
    # given a run of processes that were started one by one
    args = (cli.tiny, *LONG, "run.name=alone", f"redis.url={redis_url}", "deadlines.drain_s=60")
    processes: dict[str, subprocess.Popen[str]] = {
        role: cli.start("worker", role, "--index", "0", *args) for role in ROLES
    }
    processes["controller"] = cli.start("controller", *args)
    run = reach(cli, "alone", 2)
    # when all are told to end at once
    for process in processes.values():
        process.terminate()
    # then each does, with everything done
    for name, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, name + out[-2000:] + err[-3000:]
    assert newest_checkpoint(run) >= steps(cli, "alone")
    assert leased(cli, "alone") == 0


def test_a_second_sigterm_ends_at_once(cli: Any) -> None:
    # given a run that drains, for as long as a stopped worker makes it
    process = cli.start("up", cli.tiny, *LONG, "run.name=twice", "deadlines.drain_s=600")
    reach(cli, "twice", 1)
    os.kill(worker(cli, "reward"), signal.SIGSTOP)
    process.terminate()
    cli.wait_until(lambda: not workers(cli, "rollout"), "the other workers have left", 60.0)
    # when it is told again
    process.terminate()
    process.communicate(timeout=30)
    # then it has ended, and nothing is left
    assert process.returncode == 143
    assert not cli.processes()


def test_a_stopped_worker_is_replaced_and_the_run_goes_on(cli: Any) -> None:
    # given a run one of whose workers stands still
    process = cli.start("up", cli.tiny, *LONG, "run.name=still", "deadlines.silence_s=3")
    run = reach(cli, "still", 2)
    stopped = worker(cli, "rollout")
    os.kill(stopped, signal.SIGSTOP)
    # then it is killed and another one does its work
    cli.wait_until(lambda: bool(deaths(run, "rollout-0", "killed")), "the supervisor killed it", 90.0)
    [death] = deaths(run, "rollout-0", "killed")
    assert death.pid == stopped
    assert death.why.startswith("silent for")
    reach(cli, "still", steps(cli, "still") + 2)
    process.terminate()
    process.communicate(timeout=60)


def test_a_killed_controller_is_replaced_without_waiting_for_its_lease(cli: Any) -> None:
    # given a run whose controller is killed
    process = cli.start("up", cli.tiny, *LONG, "run.name=headless")
    run = reach(cli, "headless", 2)
    snapshot = read_snapshot(RunFolder(run))
    assert snapshot is not None
    os.kill(snapshot.pid, signal.SIGKILL)
    # then the next one begins at once, and no worker was started again
    reach(cli, "headless", steps(cli, "headless") + 2)
    log = (run / "logs" / "controller-0.log").read_text()
    assert "epoch=2" in log
    assert "waiting for the lease" not in log
    assert [len(deaths(run, f"{role}-0", "started")) for role in ROLES] == [1] * len(ROLES)
    process.terminate()
    process.communicate(timeout=60)


def worker(cli: Any, role: str) -> int:
    [found] = workers(cli, role)
    return found


def workers(cli: Any, role: str) -> list[int]:
    """Pids of the live workers of a role."""
    found = []
    for process in cli.processes():
        with contextlib.suppress(psutil.Error):  # it ends just now
            words = process.cmdline()
            found += [int(process.pid)] if "worker" in words and role in words else []
    return found
