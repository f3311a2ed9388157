"""Faults 15, 16, 27 to 29, 34: the server, the disk, the clock and the observers of a run."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import socket
import time
from statistics import median

import pytest
from chaos.live import ROOT, SERVER, LiveRun, final_hash
from chaos.recording import broken
from faults.echo import Echo, FailAt

from rlmq.common.errors import ExitCode

pytestmark = pytest.mark.timeout(300)


def test_a_killed_server_is_started_again_and_the_run_goes_on(echo, rng):
    """Fault 14, a whole run: three times."""
    run = echo(echo=Echo(work_s={"rollout": 0.1}), steps=10)
    for step in sorted(rng.sample(range(1, 9), 3)):
        run.until_step(step)
        run.moment(rng)
        run.kill(SERVER)
        time.sleep(0.5)
    run.check()


def test_a_server_that_comes_back_empty_ends_the_run_and_says_so(echo):
    """Fault 15: stop and say so; never a run mixed of two."""
    run = echo(steps=200)
    run.until_step(2)
    pid = run.send(SERVER, signal.SIGSTOP)
    shutil.rmtree(run.run / "redis" / "appendonlydir")
    run.signal(pid, signal.SIGKILL)
    assert run.wait(90) == ExitCode.INTEGRITY, run.state()
    assert "came back empty" in run.output


@pytest.mark.faults_long
def test_a_server_file_that_is_damaged_ends_the_run_and_names_the_remedy(echo, rng):
    """Fault 16: Redis refuses to start with garbage in the middle of its file."""
    run = echo(steps=200)
    run.until_step(2)
    pid = run.send(SERVER, signal.SIGSTOP)
    [file] = (run.run / "redis" / "appendonlydir").glob("*.incr.aof")
    data = bytearray(file.read_bytes())
    heads = [found.start() for found in re.finditer(rb"\r\n\*\d+\r\n\$\d+\r\n", data)]
    at = rng.choice(heads[len(heads) // 4 :]) + 2  # not inside of a value: a server does not look at these
    data[at : at + 4] = b"\x00\xff??"
    file.write_bytes(data)
    run.signal(pid, signal.SIGKILL)
    assert run.wait(120) == ExitCode.DEPENDENCY, run.state()
    assert "Bad file format" in run.output or "redis-check-aof" in run.output, run.output[-1500:]


def test_a_disk_that_is_full_while_recording_ends_the_run_and_the_same_command_goes_on(echo):
    """Fault 27: the file may not grow beyond a few kilobytes; nothing that was recorded is damaged."""
    run = echo(steps=8)
    run.until_step(1)
    pid = run.processes()["recorder-0"]
    log = (run.run / "logs" / "recorder-0.log").stat().st_size
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (log + 4096, resource.RLIM_INFINITY))
    assert run.wait(90) == ExitCode.DEPENDENCY, run.state()
    assert "samples in" in run.output and "Free disk space" in run.output
    run.start()
    run.check()


@pytest.mark.faults_long
def test_a_disk_that_is_full_while_a_checkpoint_is_written_leaves_the_older_one(tmp_path):
    """Fault 27, with the product's trainer: alert, exit code, and the same command goes on to the same bits."""
    often = ["train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=9"]
    calm = LiveRun(ROOT / "recipes" / "tiny.yaml", tmp_path / "calm", often)
    full = LiveRun(ROOT / "recipes" / "tiny.yaml", tmp_path / "full", often)
    try:
        calm.start()
        assert calm.wait(120) == 0, calm.output
        full.start()
        deadline = time.monotonic() + 90
        while full.path is None or not list(full.path.glob("checkpoints/step-000002")):
            assert time.monotonic() < deadline and not full.over, full.output
            time.sleep(0.01)
        resource.prlimit(full.processes()["actor-0"], resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        assert full.wait(90) == ExitCode.DEPENDENCY, full.output
        assert "Free disk space" in full.output
        assert [path.name for path in full.run.glob("checkpoints/step-*")] == ["step-000002"]
        full.start()
        assert full.wait(120) == 0, full.output
        assert broken(full.run, steps=6) == []
        assert final_hash(full.run) == final_hash(calm.run)
    finally:
        calm.end()
        full.end()


@pytest.mark.faults_long
def test_a_half_written_checkpoint_is_ignored_and_the_reason_said(tmp_path):
    """Fault 28: what was being written when everything died, with and without its final name."""
    recipe, often = (
        ROOT / "recipes" / "tiny.yaml",
        ["train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=9"],
    )
    calm, cut = LiveRun(recipe, tmp_path / "calm", often), LiveRun(recipe, tmp_path / "cut", often)
    try:
        calm.start()
        assert calm.wait(120) == 0, calm.output
        cut.start()
        deadline = time.monotonic() + 90
        while cut.path is None or not list(cut.path.glob("checkpoints/step-*")):
            assert time.monotonic() < deadline and not cut.over, cut.output
            time.sleep(0.01)
        cut.up.kill()
        newest = sorted(cut.run.glob("checkpoints/step-*"))[-1]
        half = newest.with_name(f"step-{int(newest.name[5:]) + 1:06d}")
        shutil.copytree(newest, half)
        with (half / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
        shutil.copytree(newest, newest.with_name(".step-000006.1.part"))
        cut.start()
        assert cut.wait(120) == 0, cut.output
        log = (cut.run / "logs" / "actor-0.log").read_text()
        assert "checkpoint_skipped" in log and str(half / "model.safetensors") in log
        assert final_hash(cut.run) == final_hash(calm.run)
    finally:
        calm.end()
        cut.end()


def test_clocks_that_are_an_hour_off_change_nothing(echo):
    """Fault 29 for workers; a machine's clock cannot be shifted for one process (time namespaces have no such
    clock), so that the server's is left."""
    shifted = {"rollout-0": 3600.0, "rollout-1": -3600.0, "reward-0": -3600.0, "actor-0": 3600.0}
    fails = [FailAt("rollout-0", "after_claim", 3)]
    run = echo(echo=Echo(clock_s=shifted, fail_at=fails), steps=6)
    run.check()
    assert run.fired()


@pytest.mark.faults_long
def test_a_scraper_that_hangs_holds_up_nobody(echo):
    """Fault 34: connections to every metrics page that never read, with half a request each."""
    run = echo(echo=Echo(work_s={"rollout": 0.2}), steps=50)
    run.until_step(6)
    held = []
    try:
        for path in run.run.glob("metrics/*.json"):
            host, _, port = json.loads(path.read_text())[0]["targets"][0].rpartition(":")
            for _ in range(5):
                held.append(socket.create_connection((host, int(port)), timeout=20))
                held[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        attached = time.time()
        assert len(held) == 5 * 8 and run.trained < 40
        run.check()
    finally:
        for one in held:
            one.close()
    steps = [(line["ended_unix_s"], line["step_s"]) for line in run.metrics() if line["kind"] == "train"]
    before = median(seconds for at, seconds in steps[1:] if at < attached)
    after = median(seconds for at, seconds in steps if at - seconds > attached)
    assert after < 3 * before + 0.5
