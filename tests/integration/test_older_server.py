"""The server comes back without its newest records, as after a loss of power or a kill while its disk was slow."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.test_resume import reach_step, trained_steps, weights

pytestmark = pytest.mark.timeout(420)

STEPS = 8
ARGUMENTS = (f"train.steps={STEPS}", "evaluate.every_steps=0")


@pytest.fixture(scope="module")
def undisturbed(module_cli: Any) -> str:
    """The weights after the last step without any disturbance."""
    done = module_cli.run("up", module_cli.tiny, *ARGUMENTS, "run.name=calm", timeout_s=200)
    assert done.code == 0, done.text
    return weights(module_cli.newest_run("calm"), STEPS)


def server_of(run: Path) -> psutil.Process:
    [found] = [
        process
        for process in psutil.process_iter(["name", "cwd"])
        if process.info["name"] in ("redis-server", "valkey-server") and process.info["cwd"] == str(run / "redis")
    ]
    return found


def kill_with_older_records(server: psutil.Process, run: Path, behind: Callable[[], bool], cli: Any) -> None:
    """Kill the server; on its disk is what was there before `behind` came true."""
    [file] = (run / "redis" / "appendonlydir").glob("*.incr.aof")
    size_bytes = file.stat().st_size
    cli.wait_until(behind, "the run goes on", 90.0)
    server.suspend()
    os.truncate(file, size_bytes)
    server.kill()


def test_a_server_that_lost_records_under_a_live_run(cli: Any, undisturbed: str) -> None:
    # given a run in its third step
    process = cli.start("up", cli.tiny, *ARGUMENTS, "checkpoint.every_steps=0", "run.name=alive")
    run = reach_step(cli, "alive", 2)
    # when the server is killed, and comes back without what it acknowledged in the last step
    kill_with_older_records(server_of(run), run, lambda: trained_steps(run) >= 3, cli)
    # then the run goes on to the undisturbed run's weights
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert weights(run, STEPS) == undisturbed


@pytest.mark.parametrize("every_steps", [0, 1])
def test_everything_is_killed_and_the_server_lost_records(cli: Any, undisturbed: str, every_steps: int) -> None:
    # given a run of which everything is killed, and whose server lost the last steps
    options = (*ARGUMENTS, f"checkpoint.every_steps={every_steps}", "run.name=dark")
    process = cli.start("up", cli.tiny, *options)
    run = reach_step(cli, "dark", 2)
    server = server_of(run)
    kill_with_older_records(server, run, lambda: trained_steps(run) >= 4, cli)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    cli.wait_until(lambda: not cli.processes(), "no orphan is left", 10.0)
    # when the same command is given, then it ends with the undisturbed run's weights
    again = cli.run("up", cli.tiny, *options, timeout_s=200)
    assert again.code == 0, again.text
    assert weights(run, STEPS) == undisturbed
    # and without a checkpoint the lost steps were made again
    log = (run / "logs" / "actor-0.log").read_text()
    assert every_steps or "the server lost rows" in log
