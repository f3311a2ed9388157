"""The wait graph and its culprit by table: what is known of a run, and whom it names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rlmq.buffer.store import Lease, Waiting
from rlmq.common.control import Death, Member, Snapshot, Wait
from rlmq.controller.culprit import explain
from rlmq.controller.evidence import Evidence, StageRows
from rlmq.controller.process_states import ProcessState
from rlmq.controller.wait_graph import age

NOW = 1000.0
ROWS = "64 rows of stage actor in table train"
PIDS = {"supervisor": 10, "redis-0": 11, "controller-0": 12, "rollout-0": 20, "rollout-1": 21, "reward-0": 30}
PIDS |= {"actor-0": 40, "actor-1": 41, "recorder-0": 50}


def member(name: str, activity: str = "idle", **fields: Any) -> Member:
    role, _, rank = name.rpartition("-")
    known = {"incarnation": 1, "pid": PIDS[name], "host": "here", "ready": True, "serving": -1}
    quick = {"silent_s": 0.2, "still_s": 0.1}
    return Member(role=role, rank=int(rank), activity=activity, **{**known, **quick, **fields})


def wait(what: str, *on: str, since_s: float = 1.0, left_s: float | None = 500.0) -> Wait:
    until = None if left_s is None else NOW + left_s
    return Wait(who="controller", what=what, on=on, since_unix_s=NOW - since_s, until_unix_s=until)


def snapshot(*members: Member, waits: tuple[Wait, ...] = (), age_s: float = 0.3, **fields: Any) -> Snapshot:
    known: dict[str, Any] = {"run_id": "demo-1", "epoch": 1, "pid": 12, "host": "here", "phase": "run", "step": 7}
    known |= {"steps": 30, "policy_version": 6, "missing": ()}
    return Snapshot(at_unix_s=NOW - age_s, members=members, waits=waits, **{**known, **fields})


def alive(**other: ProcessState | None) -> dict[str, ProcessState]:
    """All processes asleep, those of `other` otherwise (None: not known here); `_` in names stands for `-`."""
    states: dict[str, ProcessState | None] = {name: ProcessState(pid, "sleeps") for name, pid in PIDS.items()}
    states |= {name.replace("_", "-"): state for name, state in other.items()}
    return {name: state for name, state in states.items() if state is not None}


def state(name: str, standing: Any, **fields: Any) -> ProcessState:
    return ProcessState(PIDS[name], standing, **fields)


def stages(*leases: tuple[str, str, int, float], **ready: int) -> tuple[StageRows, ...]:
    """Table train; a lease is (stage, worker, rows, seconds without progress)."""
    order: dict[str, tuple[str, ...]] = {"rollout": (), "reward": ("rollout",), "actor": ("rollout", "reward")}
    return tuple(
        StageRows(
            "train",
            stage,
            after,
            ready.get(stage, 0),
            sum(rows for s, _, rows, _ in leases if s == stage),
            60.0,
            tuple(Lease(f"{w}.1", s, w, rows, 60.0 - idle_s) for s, w, rows, idle_s in leases if s == stage),
        )
        for stage, after in order.items()
    )


def ended(name: str, code: int | None, ago_s: float, *lines: str, why: str = "") -> Death:
    known = {"pid": PIDS[name], "exit_code": code, "last_lines": lines, "why": why}
    return Death(at_unix_s=NOW - ago_s, name=name, what="ended", **known)


def started(name: str, pid: int, ago_s: float) -> Death:
    return Death(at_unix_s=NOW - ago_s, name=name, what="started", pid=pid)


@dataclass
class Case:
    """A situation: what is known, and what is answered (`words` are in the sentence, in this order)."""

    name: str
    known: dict[str, Any]
    verdict: str
    culprit: str
    words: tuple[str, ...]
    unsaid: tuple[str, ...] = field(default=())


GENERATING = member("rollout-1", "generating", still_s=41.0)
STARVED = snapshot(member("rollout-0"), GENERATING, member("actor-0"), waits=(wait(ROWS, "rollout", since_s=42.0),))
HELD = stages(("rollout", "rollout-1", 64, 41.0))
GONE = {name: ProcessState(pid, "gone") for name, pid in PIDS.items()}

CASES = [
    Case(
        "a rollout worker is stopped with rows in hand",
        {"snapshot": STARVED, "stages": HELD, "processes": alive(rollout_1=state("rollout-1", "stopped"))},
        "stuck",
        "rollout-1",
        ("rollout-1 holds 64 rows of stage rollout", "no progress for 41 s", "process 21 is stopped (SIGSTOP"),
    ),
    Case(
        "a rollout worker loops for ever",
        {"snapshot": STARVED, "stages": HELD, "processes": alive(rollout_1=state("rollout-1", "runs", busy=0.99))},
        "still",
        "rollout-1",
        (
            "holds 64 rows of stage rollout",
            "process 21 computes (99% of a core)",
            "without progress that ends in 19 s",
        ),
    ),
    Case(
        "of two that hold rows, the one that made no progress for longest is named",
        {
            "snapshot": STARVED,
            "stages": stages(("rollout", "rollout-0", 32, 0.2), ("rollout", "rollout-1", 32, 9.0)),
            "processes": alive(),
        },
        "still",
        "rollout-1",
        ("rollout-1 holds 32 rows", "9.0 s", "process 21 sleeps"),
        ("rollout-0",),
    ),
    Case(
        "rewards hold up the batch, though rows are generated meanwhile",
        {
            "snapshot": snapshot(
                member("rollout-0", "generating"), member("reward-0", "scoring"), waits=(wait(ROWS),)
            ),
            "stages": stages(("rollout", "rollout-0", 8, 0.3), ("reward", "reward-0", 56, 12.0)),
            "processes": alive(),
        },
        "still",
        "reward-0",
        ("reward-0 holds 56 rows of stage reward",),
    ),
    Case(
        "a reward function's own process is stopped",
        {
            "snapshot": snapshot(member("reward-0", "scoring"), waits=(wait(ROWS),)),
            "stages": stages(("reward", "reward-0", 64, 2.0)),
            "processes": alive(reward_0=state("reward-0", "sleeps", stopped_child=31)),
        },
        "stuck",
        "reward-0",
        ("reward-0 holds 64 rows of stage reward", "child process 31 is stopped"),
    ),
    Case(
        "rows are ready and nobody claims them",
        {
            "snapshot": snapshot(member("reward-0", still_s=8.0), waits=(wait(ROWS),)),
            "stages": stages(reward=64),
            "processes": alive(reward_0=state("reward-0", "runs", busy=1.0)),
        },
        "still",
        "reward-0",
        ("reward-0 leaves 64 rows of stage reward unclaimed", "process 30 computes"),
    ),
    Case(
        "a trainer rank loops in a call, the other waits for it asleep",
        {
            "snapshot": snapshot(
                member("actor-0", "training", still_s=20.0, call="7/3/actor.train"),
                member("actor-1", "training", still_s=19.0, call="7/3/actor.train"),
                waits=(wait("call 7/3/actor.train", "actor-0", "actor-1", since_s=21.0),),
            ),
            "processes": alive(actor_1=state("actor-1", "runs", busy=0.97)),
        },
        "still",
        "actor-1",
        ("actor-1 works on call 7/3/actor.train", "no progress for 19 s", "process 41 computes"),
    ),
    Case(
        "one who itself waits for something is not the end of the chain",
        {
            "snapshot": snapshot(
                member("actor-0", "training", still_s=20.0, wait="gradients of actor-1", wait_s=18.0),
                member("actor-1", "training", still_s=6.0),
                waits=(wait("call 7/3/actor.train", "actor-0", "actor-1", since_s=21.0),),
            ),
            "processes": alive(),
        },
        "still",
        "actor-1",
        ("actor-1 works on call 7/3/actor.train",),
    ),
    Case(
        "one who says that it sleeps, and computes",
        {
            "snapshot": snapshot(
                member("actor-0", "syncing", still_s=60.0, call="7/sync/actor.send_weights"),
                member("rollout-0", still_s=60.0, wait="rows of stage rollout", wait_s=60.0),
                waits=(
                    wait("call 7/sync/actor.send_weights", "actor-0", since_s=60.0),
                    wait("call 7/sync/rollout.receive_weights", "rollout-0", since_s=60.0),
                ),
            ),
            "processes": alive() | {"rollout-0": ProcessState(42, "runs", busy=1.0)},
        },
        "still",
        "rollout-0",
        ("rollout-0", "process 42 computes"),
    ),
    Case(
        "who is called waits for rows that another one holds",
        {
            "snapshot": snapshot(
                member("actor-0", still_s=30.0, call="7/3/actor.train", wait=ROWS, wait_s=30.0),
                member("reward-0", "scoring", still_s=8.0),
                waits=(wait("call 7/3/actor.train", "actor-0", since_s=31.0),),
            ),
            "stages": stages(("reward", "reward-0", 64, 8.0)),
            "processes": alive(),
        },
        "still",
        "reward-0",
        ("reward-0 holds 64 rows of stage reward", "8.0 s", "process 30 sleeps"),
    ),
    Case(
        "the controller is stopped",
        {
            "snapshot": snapshot(member("rollout-0"), age_s=4.0),
            "processes": alive(controller_0=state("controller-0", "stopped")),
        },
        "stuck",
        "controller-0",
        ("the controller gives no calls", "written nothing for 4.0 s", "process 12 is stopped"),
    ),
    Case(
        "the controller loops",
        {
            "snapshot": snapshot(member("rollout-0"), age_s=9.0),
            "processes": alive(controller_0=state("controller-0", "runs", busy=1.0)),
        },
        "stuck",
        "controller-0",
        ("the controller has written nothing for 9.0 s", "process 12 computes (100% of a core)"),
    ),
    Case(
        "the Redis server is stopped, and the controller waits for it",
        {
            "snapshot": snapshot(member("rollout-0"), age_s=4.0),
            "server": "its process 11 is stopped",
            "processes": alive(redis_0=state("redis-0", "stopped")),
        },
        "stuck",
        "redis-0",
        ("the Redis server answers nobody", "process 11 is stopped"),
    ),
    Case(
        "a server of the user's own does not answer",
        {"snapshot": snapshot(age_s=4.0), "server": "Timeout reading", "processes": alive(redis_0=None)},
        "stuck",
        "redis-0",
        ("everybody waits for the Redis server (Timeout reading)",),
    ),
    Case(
        "the Redis server was killed and is not back yet",
        {
            "snapshot": snapshot(),
            "server": "its process 11 is gone",
            "processes": alive(redis_0=state("redis-0", "gone")),
            "deaths": [ended("redis-0", -9, 1.5, "Ready to accept connections")],
        },
        "stuck",
        "redis-0",
        ("process 11 is gone since 1.5 s with signal 9 (SIGKILL)", "its last line: Ready to accept connections"),
    ),
    Case(
        "the supervisor is stopped, and with it dead workers stay dead",
        {
            "snapshot": STARVED,
            "stages": HELD,
            "processes": alive(supervisor=state("supervisor", "stopped"), rollout_1=state("rollout-1", "gone")),
        },
        "stuck",
        "supervisor",
        ("the supervisor starts nothing again", "process 10 is stopped"),
    ),
    Case(
        "a worker died and is being started again",
        {
            "snapshot": STARVED,
            "stages": HELD,
            "processes": alive(rollout_1=state("rollout-1", "gone")),
            "deaths": [ended("rollout-1", -9, 0.4, "generating 64 rows")],
        },
        "stuck",
        "rollout-1",
        ("rollout-1 holds 64 rows", "gone since 0.4 s with signal 9 (SIGKILL), its last line: generating 64 rows"),
    ),
    Case(
        "a stopped process that nobody waits for yet is named too",
        {"snapshot": STARVED, "stages": HELD, "processes": alive(recorder_0=state("recorder-0", "stopped"))},
        "stuck",
        "recorder-0",
        ("process 50 is stopped",),
    ),
    Case(
        "of two stopped workers, the one that the controller waits for is named",
        {
            "snapshot": snapshot(GENERATING, member("recorder-0", still_s=99.0), waits=STARVED.waits),
            "stages": HELD,
            "processes": alive(recorder_0=state("recorder-0", "stopped"), rollout_1=state("rollout-1", "stopped")),
        },
        "stuck",
        "rollout-1",
        ("process 21 is stopped",),
    ),
    Case(
        "a worker that ended well is missed by nobody",
        {
            "snapshot": snapshot(member("rollout-0", "generating")),
            "processes": alive(rollout_1=state("rollout-1", "gone")),
            "deaths": [started("rollout-1", 21, 60.0), ended("rollout-1", 0, 5.0)],
        },
        "moves",
        "",
        ("rollout-0 is generating",),
    ),
    Case(
        "the link to a worker is cut",
        {
            "snapshot": snapshot(member("rollout-0", "generating", silent_s=11.0), waits=(wait(ROWS),)),
            "stages": stages(("rollout", "rollout-0", 64, 1.0)),
            "processes": alive(),
        },
        "stuck",
        "rollout-0",
        ("rollout-0 (generating) has sent no heartbeat for 11 s", "process 20 sleeps"),
    ),
    Case(
        "a reward function takes its time",
        {
            "snapshot": snapshot(
                member("reward-0", "scoring", wait="reward function f, at most 60 s"), waits=(wait(ROWS),)
            ),
            "stages": stages(("reward", "reward-0", 64, 4.0)),
            "processes": alive(reward_0=state("reward-0", "sleeps", busy_child=31)),
        },
        "still",
        "reward-0",
        ("64 rows of stage reward, waits for reward function f, at most 60 s", "30 sleeps, its child 31 computes"),
    ),
    Case(
        "the supervisor loops and does not see that a worker died",
        {
            "snapshot": snapshot(member("rollout-0", "generating", silent_s=4.0), waits=(wait(ROWS),)),
            "processes": alive(
                supervisor=state("supervisor", "runs", busy=1.0),
                rollout_0=state("rollout-0", "gone", unreaped_s=2.1),
            ),
            "deaths": [started("rollout-0", 20, 60.0)],
        },
        "stuck",
        "supervisor",
        ("the supervisor does not notice that rollout-0, process 20, has ended: process 10 computes",),
    ),
    Case(
        "a worker on another host is silent",
        {
            "snapshot": snapshot(
                member("rollout-0", "generating", silent_s=7.0, host="there"), waits=(wait(ROWS),)
            ),
            "processes": alive(rollout_0=None),
        },
        "stuck",
        "rollout-0",
        ("no heartbeat for 7.0 s", "of host there"),
    ),
    Case(
        "a worker has not joined yet",
        {
            "snapshot": snapshot(missing=("actor-0", "recorder-0"), waits=(wait("workers", "actor-0"),)),
            "processes": alive(),
        },
        "starting",
        "actor-0",
        ("waits for actor-0 and 1 more to be ready", "process 40 sleeps"),
    ),
    Case(
        "the run moves",
        {
            "snapshot": snapshot(member("rollout-0", "generating"), waits=(wait(ROWS),)),
            "stages": stages(("rollout", "rollout-0", 64, 0.4)),
            "processes": alive(),
        },
        "moves",
        "rollout-0",
        (
            "run demo-1 moves, step 7 of 30",
            f"controller waits for {ROWS}",
            "rollout-0 holds 64 rows",
            "progress 0.4 s ago",
        ),
    ),
    Case(
        "the loop is between two waits",
        {"snapshot": snapshot(member("rollout-0"), member("actor-0", "training")), "processes": alive()},
        "moves",
        "",
        ("run demo-1 moves, step 7 of 30: actor-0 is training",),
    ),
    Case(
        "a worker that has not joined is stopped",
        {
            "snapshot": snapshot(missing=("actor-0",), waits=(wait("workers", "actor-0"),)),
            "processes": alive(actor_0=state("actor-0", "stopped")),
        },
        "stuck",
        "actor-0",
        ("actor-0 has not joined: process 40 is stopped",),
    ),
    Case(
        "the run is paused",
        {"snapshot": snapshot(member("rollout-0", still_s=60.0), phase="pause"), "processes": alive()},
        "paused",
        "",
        ("run demo-1 is paused", "rlmq resume"),
    ),
    Case(
        "rows that nobody claims in a pause are nobody's fault",
        {
            "snapshot": snapshot(member("reward-0", still_s=60.0), waits=(wait(ROWS),), phase="pause"),
            "stages": stages(reward=64),
            "processes": alive(),
        },
        "paused",
        "",
        ("is paused",),
    ),
    Case(
        "work in hand that does not end holds up a pause",
        {
            "snapshot": snapshot(
                member("actor-0", "training", still_s=9.0), waits=(wait("call x", "actor-0"),), phase="pause"
            ),
            "processes": alive(),
        },
        "still",
        "actor-0",
        ("actor-0 works on call x", "process 40 sleeps"),
    ),
    Case(
        "the store cannot be asked from here",
        {
            "snapshot": snapshot(
                member("rollout-0"), member("rollout-1", "generating", still_s=5.0), waits=(wait(ROWS, "rollout"),)
            ),
            "server": "no answer",
            "processes": alive(redis_0=None),
        },
        "still",
        "rollout-1",
        ("rollout-1 is generating, no progress for 5.0 s",),
    ),
    Case(
        "the controller is on another host and silent",
        {"snapshot": snapshot(host="there", age_s=60.0), "processes": {}},
        "stuck",
        "controller-0",
        ("written nothing for 60 s: process 12 of host there cannot be seen from here",),
    ),
    Case(
        "the run ended well",
        {"snapshot": snapshot(age_s=720.0, ended=0, step=30), "processes": GONE, "ended": 0},
        "ended",
        "",
        ("run demo-1 ended 12 min ago with exit 0, step 30 of 30",),
    ),
    Case(
        "the run ended with an error of a worker",
        {
            "snapshot": snapshot(age_s=60.0, ended=2),
            "processes": GONE,
            "ended": 2,
            "deaths": [
                ended("reward-0", 2, 60.0, "x", "error: r.py:score: got None"),
                ended("controller-0", 0, 60.0),
            ],
        },
        "ended",
        "",
        ("ended 60 s ago with exit 2", "reward-0 said: r.py:score: got None"),
    ),
    Case(
        "everything was killed together",
        {
            "snapshot": snapshot(age_s=300.0, waits=(wait("call 7/3/actor.train", "actor-0"),)),
            "processes": GONE,
            "server": "its process 11 is gone",
        },
        "ended",
        "supervisor",
        ("killed with its supervisor, process 10", "last word was 5 min ago, step 7 of 30", "call 7/3/actor.train"),
    ),
    Case(
        "a worker that was killed is not ready again yet",
        {
            "snapshot": snapshot(
                member("rollout-0", ready=False, still_s=9.0),
                waits=(wait("call 7/4/rollout.receive_weights", "rollout-0"),),
                missing=("rollout-0",),
            ),
            "processes": alive(rollout_0=ProcessState(99, "runs", busy=0.9)),
            "deaths": [ended("rollout-0", -9, 9.5), started("rollout-0", 99, 9.0)],
        },
        "starting",
        "rollout-0",
        ("waits for rollout-0 to be ready: process 99 computes (90% of a core), started 9.0 s ago",),
    ),
    Case(
        "the controller was killed and starts again",
        {
            "snapshot": snapshot(age_s=5.0),
            "processes": alive(controller_0=ProcessState(99, "runs", busy=1.0)),
            "deaths": [ended("controller-0", -9, 4.5), started("controller-0", 99, 4.0)],
        },
        "starting",
        "controller-0",
        ("controller of run demo-1 is starting", "process 99 computes"),
    ),
    Case(
        "nothing has begun",
        {"snapshot": None},
        "ended",
        "",
        ("never had a controller",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_names_the_culprit(case: Case) -> None:
    answer = explain(Evidence(now_unix_s=NOW, run_id="demo-1", **{"snapshot": None, **case.known}))

    assert (answer.verdict, answer.culprit) == (case.verdict, case.culprit), answer.sentence
    place = -1
    for word in case.words:
        found = answer.sentence.find(word, place + 1)
        assert found > place, f"{word!r} in {answer.sentence!r}"
        place = found
    assert not any(word in answer.sentence for word in case.unsaid), answer.sentence
    assert "\n" not in answer.sentence


def test_the_graph_has_the_controller_the_leases_and_who_sleeps() -> None:
    # given a controller that waits for rows, a lease that is out, and a reward worker that waits for its rows
    evidence = Evidence(
        now_unix_s=NOW,
        run_id="demo-1",
        snapshot=snapshot(member("rollout-1", "generating"), member("reward-0", wait="rows"), waits=(wait(ROWS),)),
        stages=stages(("rollout", "rollout-1", 64, 2.0)),
        waiting=[Waiting("reward-0", name, "reward", "1 ready rows", 2.5) for name in ("train", "eval")],
        processes=alive(),
    )
    # when the graph is asked
    edges = explain(evidence).edges
    # then each has its edge, once, with since when, until when and whose it is
    assert [(edge.who, edge.what, edge.on) for edge in edges] == [
        ("controller", ROWS, ()),
        ("stage rollout of train", "64 rows that are leased", ("rollout-1",)),
        ("reward-0", "rows of stage reward in table train or eval", ("rollout-1",)),
    ]
    assert [(round(edge.since_s, 1), edge.left_s) for edge in edges] == [(1.0, 500.0), (2.0, 58.0), (2.5, None)]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0.0 s"),
        (0.44, "0.4 s"),
        (41.2, "41 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2 h"),
        (200_000, "2 days"),
    ],
)
def test_ages_in_words(seconds: float, words: str) -> None:
    assert age(seconds) == words
