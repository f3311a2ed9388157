"""`rlmq status`, `why`, and `log`, on a run folder and real processes."""

from __future__ import annotations

import json
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from rlmq import cli_log, cli_status, cli_why
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Stage, Table
from rlmq.common.columns import Column
from rlmq.common.control import Death, Member, Order, Snapshot, Wait
from rlmq.common.recipe.load import load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller import events
from rlmq.controller.addresses import write_addresses
from rlmq.controller.runs import open_run

pytestmark = pytest.mark.timeout(60)

RECIPE = """
run: {name: c, seed: 7}
model: ./m
data: {train: t.jsonl, prompts_per_step: 4}
reward: [{function: "r.py:score"}, {function: "r.py:brevity", weight: 0.5}]
train: {steps: 30, lr: 1e-4}
"""


class Bench:
    """A run folder with what its control plane would write, and processes that stand where the run's stand."""

    def __init__(self, folder: Path) -> None:
        (folder / "c.yaml").write_text(RECIPE)
        recipe = load_recipe(folder / "c.yaml", [f"run.folder={folder / 'runs'}"]).recipe
        self.run: RunFolder = open_run(recipe).run
        self.folder = folder / "runs"
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str, program: str = "time.sleep(600)") -> None:
        """A process for each name, which has begun its program when this returns."""
        for name in names:
            command = [sys.executable, "-c", f"import time; print(1, flush=True); {program}"]
            self.children[name] = child = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert child.stdout is not None
            assert child.stdout.readline()
            self.record(Death(at_unix_s=time.time(), name=name, what="started", pid=child.pid))

    def record(self, death: Death) -> None:
        with self.run.supervisor_log.open("ab") as file:
            file.write(msgspec.json.encode(death) + b"\n")

    def line(self, event: events.Event, *commands: events.Command) -> None:
        with self.run.control_log.open("ab") as file:
            line = events.Line(at=event.at, epoch=1, event=event, commands=commands)
            file.write(msgspec.json.encode(line) + b"\n")

    def snapshot(self, *members: Member, waits: tuple[Wait, ...] = (), **fields: Any) -> None:
        controller = self.children.get("controller-0")
        known: dict[str, Any] = {"at_unix_s": time.time(), "run_id": self.run.run_id, "epoch": 1, "phase": "run"}
        known |= {"pid": controller.pid if controller else 1, "host": platform.node(), "step": 7, "steps": 30}
        known |= {"policy_version": 6, "missing": ()}
        self.run.control.write_bytes(msgspec.json.encode(Snapshot(members=members, waits=waits, **known | fields)))

    def member(self, name: str, **fields: Any) -> Member:
        role, _, rank = name.rpartition("-")
        known: dict[str, Any] = {"incarnation": 1, "pid": self.children[name].pid, "host": platform.node()}
        known |= {"activity": "generating", "ready": True, "serving": 6, "silent_s": 0.1, "still_s": 0.2}
        return Member(role=role, rank=int(rank), **known | fields)

    def why(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        capsys.readouterr()
        assert cli_why.why_command(None, folder=self.folder, as_json=True) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def log(self, capsys: pytest.CaptureFixture[str], **how: Any) -> list[str]:
        capsys.readouterr()
        options: dict[str, Any] = {"step": None, "worker": None, "follow": False, "as_json": False}
        assert cli_log.log_command(None, folder=self.folder, **options | how) == 0
        return capsys.readouterr().out.splitlines()

    def end(self) -> None:
        for child in self.children.values():
            child.send_signal(signal.SIGCONT)
            child.kill()
            child.communicate()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


# -- why -----------------------------------------------------------------------------------------------------------


def test_a_stopped_process_is_named_until_it_goes_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    # given a controller that waits for a worker, and the worker stopped
    bench.start("controller-0", "rollout-0")
    now = time.time()
    wait = Wait(who="controller-0", what="call 7/2/rollout.x", on=("rollout-0",), since_unix_s=now - 4)
    child = bench.children["rollout-0"]
    child.send_signal(signal.SIGSTOP)
    # when somebody asks why, then the process is named with its pid and state
    bench.snapshot(bench.member("rollout-0", call="7/2/rollout.x"), waits=(wait,))
    told = bench.why(capsys)
    assert (told["verdict"], told["culprit"], told["pid"], told["process"]) == (
        "stuck",
        "rollout-0",
        child.pid,
        "stopped",
    )
    assert f"process {child.pid} is stopped (SIGSTOP" in told["sentence"]
    assert told["waits"][0]["on"] == ["rollout-0"]
    # and after SIGCONT it is not
    child.send_signal(signal.SIGCONT)
    bench.snapshot(bench.member("rollout-0"), waits=(wait,))
    assert bench.why(capsys)["verdict"] == "moves"


def test_a_worker_that_loops_is_told_from_one_that_sleeps(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    # given two workers that made no progress for 20 s in the same call, one of them computing
    bench.start("controller-0", "actor-0")
    bench.start("actor-1", program="any(iter(int, 1))")
    wait = Wait(
        who="controller-0", what="call 7/3/actor.train", on=("actor-0", "actor-1"), since_unix_s=time.time()
    )
    members = (bench.member("actor-0", still_s=20.0), bench.member("actor-1", still_s=19.0))
    bench.snapshot(*members, waits=(wait,))
    # when somebody asks why
    told = bench.why(capsys)
    # then it is the one that computes
    assert (told["verdict"], told["culprit"], told["process"]) == ("still", "actor-1", "runs")
    assert "computes" in told["sentence"]


def test_a_pid_that_another_process_has_now_is_not_the_worker(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a record of a worker that ran an hour ago, whose pid a living process has
    bench.start("controller-0", "other")
    pid = bench.children["other"].pid
    bench.record(Death(at_unix_s=time.time() - 3600, name="rollout-0", what="started", pid=pid))
    bench.snapshot()

    told = bench.why(capsys)

    assert (told["culprit"], told["process"]) == ("rollout-0", "gone")


def test_a_run_whose_processes_are_gone_is_explained_from_its_files(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a run that was killed whole, while its controller waited for a call
    bench.start("controller-0", "actor-0")
    now = time.time()
    wait = Wait(who="controller-0", what="call 7/3/actor.train", on=("actor-0",), since_unix_s=now - 600)
    bench.snapshot(bench.member("actor-0"), waits=(wait,), at_unix_s=now - 300)
    for child in bench.children.values():
        child.kill()
        child.wait()
    # when a person asks
    assert cli_why.why_command(None, folder=bench.folder, as_json=False) == 0
    out = capsys.readouterr().out
    # then the files tell, with their age
    assert "from the run's files, 5 min old" in out
    assert "when controller-0 waited for call 7/3/actor.train (actor-0)" in out
    assert len(out.splitlines()) <= 24
    # and the status has no run that is up
    assert cli_status.status_command(None, folder=bench.folder, as_json=False) == 3


def test_the_holder_of_rows_is_found_in_the_store(
    bench: Bench, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # given four rows, of which one is scored, one leased to the reward worker, two to the rollout worker
    columns = (
        Column("prompt", pa.string(), "prompts"),
        Column("response", pa.string(), "rollout"),
        Column("reward", pa.float64(), "reward"),
    )
    stages = (Stage("actor", ("reward",)), Stage("reward", ("response",)), Stage("rollout", ("prompt",)))
    tables = [Table(name, columns, stages) for name in ("train", "eval")]
    write_addresses(bench.run, redis_url)
    stores = {
        name: RedisStore(redis_url, run_id=bench.run.run_id, worker=name) for name in ("rollout-0", "reward-0")
    }
    for store in stores.values():
        store.open(tables)
    rows = pa.record_batch({"prompt": ["a", "b", "c", "d"]})
    stores["rollout-0"].put("train", rows, producer="p", sequence=0, group_size=1)
    generated = stores["rollout-0"].claim("train", "rollout", max_rows=2, columns=("prompt",))
    assert generated is not None
    stores["rollout-0"].write(generated, pa.record_batch({"response": ["x", "y"]}), ack=True)
    assert stores["rollout-0"].claim("train", "rollout", max_rows=2, columns=("prompt",))
    scored = stores["reward-0"].claim("train", "reward", max_rows=1, columns=("response",))
    assert scored is not None
    stores["reward-0"].write(scored, pa.record_batch({"reward": [1.0]}), ack=True)
    assert stores["reward-0"].claim("train", "reward", max_rows=1, columns=("response",))
    bench.start("controller-0", "rollout-0", "reward-0")
    what = "4 rows of stage actor in table train"
    wait = Wait(who="controller-0", what=what, on=("rollout", "reward"), since_unix_s=time.time())
    bench.snapshot(bench.member("rollout-0"), bench.member("reward-0"), waits=(wait,))
    # when somebody asks why
    told = bench.why(capsys)
    # then the stages before the actor's are looked through, and the leases are in the graph
    assert told["culprit"] in ("rollout-0", "reward-0")
    assert re.search(
        r"(rollout-0 holds 2 rows of stage rollout|reward-0 holds 1 row of stage reward)", told["sentence"]
    )
    leased = {(edge["who"], edge["what"], *edge["on"]) for edge in told["waits"]}
    assert ("stage rollout of train", "2 rows that are leased", "rollout-0") in leased
    assert ("stage reward of train", "1 row that is leased", "reward-0") in leased
    # and the status has the rows of each stage
    assert cli_status.status_command(None, folder=bench.folder, as_json=False) == 0
    out = capsys.readouterr().out
    assert (
        "buffer train: 4 live rows; actor 1 ready 0 leased, reward 0 ready 1 leased, rollout 0 ready 2 leased"
        in out
    )
    for store in stores.values():
        store.close()


# -- status --------------------------------------------------------------------------------------------------------


def test_status_has_each_worker_with_its_restarts(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    # given a worker that was killed once and one that was told to end once
    for name, code in (("rollout-0", -9), ("reward-0", 143)):
        bench.record(Death(at_unix_s=time.time(), name=name, what="started", pid=999_999))
        bench.record(Death(at_unix_s=time.time(), name=name, what="ended", pid=999_999, exit_code=code))
    bench.start("controller-0", "rollout-0", "reward-0")
    bench.snapshot(bench.member("rollout-0", call="7/x"), bench.member("reward-0", wait="rows of stage reward"))
    # when a person looks
    assert cli_status.status_command(None, folder=bench.folder, as_json=False) == 0
    out = capsys.readouterr().out
    # then each has its line
    assert "c-1: phase run, step 7 of 30, policy version 6" in out
    [rollout] = [line.split() for line in out.splitlines() if line.startswith("rollout-0 ")]
    assert rollout[1:4] == ["generating", "7/x", "6"]
    assert rollout[-1] == "1"
    [reward] = [line for line in out.splitlines() if line.startswith("reward-0 ")]
    assert reward.rstrip().endswith("0   rows of stage reward")


def test_status_of_a_run_that_ended_has_its_exit_code(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.snapshot(ended=5, pid=999_999)
    said = ("x", "error: the run: got no progress for 600 s")
    end = Death(at_unix_s=time.time(), name="controller-0", what="ended", pid=1, exit_code=5, last_lines=said)
    bench.record(end)

    assert cli_status.status_command(None, folder=bench.folder, as_json=True) == 5

    told = json.loads(capsys.readouterr().out)
    assert (told["up"], told["ended"], told["control"]["step"]) == (False, 5, 7)
    assert "controller-0 said: the run: got no progress for 600 s" in told["why"]


# -- log -----------------------------------------------------------------------------------------------------------


def a_story(bench: Bench) -> None:
    """Two steps; a worker dies in the second, and an operator asks for less."""
    workers = {"rollout": 1, "actor": 2}
    bench.line(events.Began(at=10.0, epoch=1, workers=workers, quorum={}, silence_s=30.0, step=0))
    bench.line(events.Heard(at=11.0, role="rollout", rank=0, incarnation=1, ready=True))
    for step in (1, 2):
        at, call = 20.0 * step, f"{step}/3/actor.train"
        bench.line(events.Opened(at=at, step=step))
        asked = events.Asked(at=at + 1, call_id=call, role="actor", method="train", deadline_s=9.0)
        bench.line(asked, events.Submit(call_id=call, role="actor", method="train", ranks=(0, 1)))
        looked = events.Looked(at=at + 3.5, call_id=call, known=True, ranks=(0, 1), answered=(0, 1))
        bench.line(looked, events.Resolve(call_id=call, ranks=(0, 1)))
    bench.record(
        Death(
            at_unix_s=42.0, name="rollout-0", what="ended", pid=5, exit_code=-9, call="2/x", last_lines=("a", "b")
        )
    )
    order = Order(verb="set", at_unix_s=43.0, by="ada", settings={"train.steps": "40"})
    bench.line(events.Ordered(at=43.6, number=1, order=order))
    bench.line(
        events.Asked(at=44.0, call_id="2/6/actor.checkpoint", role="actor", method="checkpoint", deadline_s=9)
    )


def test_the_log_tells_both_histories_by_time(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    a_story(bench)

    told = [line.partition("  ")[2] or line for line in bench.log(capsys)]

    assert told[:-1] == [
        "controller began epoch 1, phase run; workers: 1 rollout, 2 actor",
        "rollout-0 is ready (incarnation 1)",
        "step 1 opened",
        "call 1/3/actor.train done by ranks 0,1 in 2.500 s",
        "step 2 opened",
        "rollout-0 ended, process 5, signal 9 (SIGKILL), in call 2/x",
        "    a",
        "    b",
        "call 2/3/actor.train done by ranks 0,1 in 2.500 s",
        "order 1: set train.steps=40 by ada",
    ]
    assert told[-1].startswith("call 2/6/actor.checkpoint is open for ")


def test_the_log_of_a_step_and_of_a_worker(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    a_story(bench)

    of_step = bench.log(capsys, step=1)
    of_worker = bench.log(capsys, worker="actor-1")
    raw = [json.loads(line) for line in bench.log(capsys, worker="rollout-0", as_json=True)]

    assert [line.partition("  ")[2] for line in of_step] == [
        "step 1 opened",
        "call 1/3/actor.train done by ranks 0,1 in 2.500 s",
    ]
    assert len(of_worker) == 2
    assert all("actor.train done" in line for line in of_worker)
    assert [line.get("name") or line["event"]["type"] for line in raw] == ["heard", "rollout-0"]


def test_the_log_is_followed_to_the_end_of_the_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    # given somebody who follows
    follower = threading.Thread(target=cli_log.log_command, args=(None,), kwargs=follow(bench))
    follower.start()
    # when lines come, then the end
    bench.line(events.Opened(at=1.0, step=1))
    bench.run.summary.write_text('{"exit": 0}')
    follower.join(timeout=20)
    # then the follower has seen them and has ended
    assert not follower.is_alive()
    assert "step 1 opened" in capsys.readouterr().out


def follow(bench: Bench) -> dict[str, Any]:
    return {"folder": bench.folder, "step": None, "worker": None, "follow": True, "as_json": False}


def test_an_event_of_a_later_version_is_shown_as_it_is(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run.control_log.write_text('{"at": 1.0, "epoch": 1, "event": {"type": "dreamt", "of": "sheep"}}\n{"at":')

    [line] = bench.log(capsys)

    assert line.endswith("dreamt of=sheep")
