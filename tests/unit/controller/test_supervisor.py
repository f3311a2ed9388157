"""The supervisor over real processes; small Python programs stand for controller and workers."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from rlmq.common.control import Death, Member, Snapshot
from rlmq.common.errors import DependencyError
from rlmq.common.run_folder import RunFolder
from rlmq.controller.commands import ProcessSpec
from rlmq.controller.fork_server import Forks
from rlmq.controller.guard import Guard
from rlmq.controller.history import History
from rlmq.controller.records import read_deaths
from rlmq.controller.server import Server, find_binary
from rlmq.controller.supervised import Supervised
from rlmq.controller.supervisor import Outcome, Patience, Supervisor

SLEEPS = "import time\ntime.sleep(60)"
PATIENCE = Patience(controller_s=1.5, workers_s=2.5, everything_s=3.0, farewell_s=0.5)


def program(role: str, code: str, index: int = 0) -> ProcessSpec:
    return ProcessSpec(role, index, (sys.executable, "-c", code), {})


def supervise(
    run: RunFolder,
    *specs: ProcessSpec,
    tick: Callable[[Supervisor], None] | None = None,
    server: Server | None = None,
) -> tuple[Outcome, list[str]]:
    events: list[str] = []
    supervisor = Supervisor(
        run,
        specs,
        server=server,
        event=events.append,
        tick=lambda: tick(supervisor) if tick is not None else None,
        patience=PATIENCE,
    )
    return supervisor.run(), events


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 15.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    path = tmp_path / "runs" / "b-1"
    path.mkdir(parents=True)
    return RunFolder(path)


def exits_after(file: Path, code: int = 0) -> str:
    """A controller that ends with a code once the file exists."""
    return f"import os, sys, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.02)\nsys.exit({code})"


def dies_until(counter: Path, times: int, ending: str, then: str) -> str:
    """A worker that ends in a way for so many starts, and then does something else."""
    return (
        "import os, sys, time, signal\n"
        f"n = os.path.getsize({str(counter)!r}) if os.path.exists({str(counter)!r}) else 0\n"
        f"open({str(counter)!r}, 'a').write('x')\n"
        f"if n < {times}:\n    {ending}\n"
        f"{then}"
    )


def test_the_controllers_exit_ends_the_run_with_its_code_and_nothing_is_left(run: RunFolder) -> None:
    pids: set[int] = set()

    outcome, _ = supervise(
        run,
        program("controller", "import time; time.sleep(0.5)"),
        program("actor", SLEEPS),
        tick=lambda s: pids.update(s.alive().values()),
    )

    assert outcome == Outcome(0)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_output_of_each_process_goes_to_its_log(run: RunFolder) -> None:
    supervise(
        run,
        program("controller", "import time; time.sleep(0.4)"),
        program("reward", "print('scoring', flush=True)", index=1),
    )

    assert (run.logs / "reward-1.log").read_text() == "scoring\n"


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(75)", "sys.exit(1)"])
def test_a_worker_that_a_fresh_process_may_cure_is_started_again(
    run: RunFolder, tmp_path: Path, ending: str
) -> None:
    done = tmp_path / "done"
    code = dies_until(tmp_path / "n", 2, ending, f"open({str(done)!r}, 'w'); time.sleep(60)")

    outcome, events = supervise(run, program("controller", exits_after(done)), program("rollout", code))

    assert outcome == Outcome(0)
    assert len([e for e in events if e.startswith("rollout-0 ended with")]) == 2


def test_a_killed_controller_is_started_again(run: RunFolder, tmp_path: Path) -> None:
    code = dies_until(tmp_path / "n", 1, "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)")

    outcome, events = supervise(run, program("controller", code))

    assert outcome == Outcome(0)
    assert "signal 9 (SIGKILL)" in events[0]


def test_a_used_up_budget_ends_the_run_with_the_workers_last_words(run: RunFolder) -> None:
    code = "import os, signal\nprint('about to crash', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"

    def limit(supervisor: Supervisor) -> None:
        for process in supervisor._all:
            process.budget.limit = 2

    outcome, _ = supervise(run, program("controller", SLEEPS), program("rollout", code), tick=limit)

    assert outcome.exit_code == 75
    for part in ("rollout-0", "signal 11 (SIGSEGV)", "after 2 restarts", "about to crash", sys.executable):
        assert part in outcome.message


@pytest.mark.parametrize("code", [2, 3, 4, 6])
def test_a_fatal_exit_code_ends_the_run_with_the_workers_own_message(run: RunFolder, code: int) -> None:
    worker = (
        f"import sys\nprint('noise'); print('error: rewards.py:score: got NaN.', file=sys.stderr)\nsys.exit({code})"
    )
    pids: set[int] = set()

    outcome, _ = supervise(
        run,
        program("controller", SLEEPS),
        program("reward", worker),
        program("actor", SLEEPS),
        tick=lambda s: pids.update(s.alive().values()),
    )

    assert outcome.exit_code == code
    assert outcome.message == f"reward-0: rewards.py:score: got NaN. (log: {run.logs / 'reward-0.log'})"
    assert all(gone(pid) for pid in pids)


def test_the_message_of_an_earlier_start_is_not_told_again(run: RunFolder) -> None:
    run.logs.mkdir()
    (run.logs / "controller-0.log").write_text("error: from yesterday\n")

    outcome, _ = supervise(run, program("controller", "import sys; print('today'); sys.exit(5)"))

    assert outcome.exit_code == 5
    assert "yesterday" not in outcome.message
    assert "today" in outcome.message


def test_ctrl_c_reaches_the_controller_first_and_ends_with_130(run: RunFolder, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    controller = (
        "import signal, sys, time\n"
        f"def save(*_): time.sleep(0.5); open({str(saved)!r}, 'w').write('x'); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, save)\nprint('armed', flush=True)\ntime.sleep(60)"
    )
    log = run.logs / "controller-0.log"
    threading.Thread(target=_interrupt_when, args=(lambda: "armed" in _text(log), signal.SIGINT)).start()

    outcome, _ = supervise(run, program("controller", controller), program("actor", SLEEPS))

    assert outcome.exit_code == 130
    assert saved.exists()


def test_processes_that_ignore_every_wish_are_killed_in_time(run: RunFolder) -> None:
    stubborn = (
        "import signal, time\nfor n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
        "print('armed', flush=True)\ntime.sleep(60)"
    )
    log = run.logs / "actor-0.log"
    pids: set[int] = set()
    threading.Thread(target=_interrupt_when, args=(lambda: "armed" in _text(log), signal.SIGTERM)).start()
    began = time.monotonic()

    outcome, _ = supervise(
        run,
        program("controller", stubborn),
        program("actor", stubborn),
        tick=lambda s: pids.update(s.alive().values()),
    )

    assert outcome.exit_code == 143
    assert time.monotonic() - began < PATIENCE.everything_s + 5
    assert all(gone(pid) for pid in pids)


def test_a_second_ctrl_c_ends_at_once(run: RunFolder) -> None:
    slow = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('armed', flush=True)\n{SLEEPS}"
    log = run.logs / "controller-0.log"
    told: list[float] = []

    def press(supervisor: Supervisor) -> None:
        if "armed" in _text(log) and len(told) < 2:
            told.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    outcome, events = supervise(run, program("controller", slow), program("actor", SLEEPS), tick=press)

    assert outcome.exit_code == 130
    assert events[-1] == "stopping at once"
    assert time.monotonic() - told[1] < PATIENCE.controller_s


def test_the_caller_gets_its_signal_handlers_back(run: RunFolder) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)

    supervise(run, program("controller", "pass"))

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)) == before


def test_children_of_a_killed_worker_end_with_it(run: RunFolder, tmp_path: Path) -> None:
    pid_file, done = tmp_path / "pid", tmp_path / "done"
    code = dies_until(
        tmp_path / "n",
        1,
        "import subprocess; p = subprocess.Popen(['sleep', '60']); "
        f"open({str(pid_file)!r}, 'w').write(str(p.pid)); os.kill(os.getpid(), signal.SIGKILL)",
        f"open({str(done)!r}, 'w'); time.sleep(60)",
    )

    supervise(run, program("controller", exits_after(done)), program("reward", code))

    wait_until(lambda: gone(int(pid_file.read_text())), "the grandchild's end")


def test_a_killed_server_is_started_again_with_its_data(run: RunFolder, tmp_path: Path) -> None:
    import redis

    server = Server(run, find_binary())
    done = tmp_path / "done"
    killed: list[int] = []
    found: list[object] = []

    def disturb(_: Supervisor) -> None:
        if server.child is None or found:
            return
        client = redis.Redis.from_url(server.administrator_url)
        try:
            if not killed:
                client.config_set("appendfsync", "always")
                client.set("k", "v")
                killed.append(server.child.pid)
                server.child.kill()
            elif server.child.pid != killed[0]:
                found.append(client.get("k"))
                done.touch()
        except redis.RedisError:
            pass  # not yet back

    outcome, events = supervise(run, program("controller", exits_after(done)), server=server, tick=disturb)

    assert outcome == Outcome(0)
    assert found == [b"v"]
    assert any("Redis server ended" in e for e in events)
    assert not run.sockets.exists()


KILLED = """
import sys, pathlib, json
from rlmq.common.run_folder import RunFolder
from rlmq.controller.commands import ProcessSpec
from rlmq.controller.fork_server import Forks
from rlmq.controller.server import Server, find_binary
from rlmq.controller.supervisor import Supervisor
grand = "import subprocess, time\\nsubprocess.Popen(['sleep', '77'], process_group=0)\\ntime.sleep(77)"
run = RunFolder(pathlib.Path(sys.argv[1]))
specs = [ProcessSpec(r, 0, (sys.executable, "-c", grand), {}) for r in ("controller", "reward")]
Supervisor(run, specs, server=Server(run, find_binary())).run()
"""


def test_killing_the_supervisor_leaves_no_orphan_and_no_socket(run: RunFolder) -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED, str(run.path)])
    try:
        me = psutil.Process(parent.pid)
        wait_until(lambda: len(me.children(recursive=True)) == 6, "server, guard, two processes and their children")
        family = me.children(recursive=True)
    finally:
        parent.kill()
    parent.wait()

    wait_until(lambda: all(gone(child.pid) for child in family), "everybody's end", deadline_s=5.0)
    wait_until(lambda: not run.sockets.exists(), "the socket folder's end", deadline_s=5.0)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _interrupt_when(condition: Callable[[], bool], number: int) -> None:
    wait_until(condition, "the processes")
    os.kill(os.getpid(), number)


def test_foreign_launcher_variables_do_not_reach_processes(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    spec = ProcessSpec(
        "controller",
        0,
        (sys.executable, "-c", "import os, json; print(json.dumps(dict(os.environ)))"),
        {"MASTER_PORT": None, "OMP_NUM_THREADS": "3"},
    )

    supervise(run, spec)

    environment = json.loads(_text(run.logs / "controller-0.log"))
    assert "MASTER_PORT" not in environment
    assert environment["OMP_NUM_THREADS"] == "3"


def show(run: RunFolder, supervisor: Supervisor, *, phase: str = "run", call: str = "", lost: str = "") -> None:
    """Write the snapshot as a controller would; `lost` is the worker that it calls lost."""
    members = tuple(
        Member(
            role=name.partition("-")[0],
            rank=0,
            incarnation=1,
            pid=pid,
            host=platform.node(),
            activity="scoring",
            ready=True,
            serving=-1,
            silent_s=31.0 if name == lost else 0.1,
            still_s=0.0,
            call=call,
            lost=name == lost,
        )
        for name, pid in supervisor.alive().items()
    )
    controller = supervisor.alive().get("controller-0", 0)
    snapshot = Snapshot(
        at_unix_s=time.time(),
        run_id=run.run_id,
        epoch=1,
        pid=controller,
        host=platform.node(),
        phase=phase,
        step=1,
        steps=2,
        policy_version=0,
        members=members,
        missing=(),
        waits=(),
    )
    partial = run.control.with_suffix(".new")
    partial.write_bytes(msgspec.json.encode(snapshot))
    partial.replace(run.control)


def deaths(run: RunFolder, name: str, what: str = "ended") -> list[Death]:
    return [death for death in read_deaths(run) if death.name == name and death.what == what]


def test_a_death_is_written_with_signal_call_and_last_words(run: RunFolder, tmp_path: Path) -> None:
    # given a worker of which the controller says that it works on a call, and that dies then
    go, done = tmp_path / "go", tmp_path / "done"
    code = dies_until(
        tmp_path / "n",
        1,
        f"print('half way', flush=True)\n    while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)",
        f"open({str(done)!r}, 'w'); time.sleep(60)",
    )

    def tick(supervisor: Supervisor) -> None:
        if not go.exists():
            show(run, supervisor, call="3/2/actor.train")
            if "half way" in _text(run.logs / "actor-0.log"):
                go.touch()

    _, events = supervise(run, program("controller", exits_after(done)), program("actor", code), tick=tick)

    [death] = [d for d in deaths(run, "actor-0") if d.exit_code == -signal.SIGSEGV]
    assert (death.call, death.last_lines) == ("3/2/actor.train", ("half way",))
    assert any("signal 11 (SIGSEGV) in call 3/2/actor.train; starting it again (1 of 5)" in e for e in events)
    assert [d.why for d in deaths(run, "actor-0", "started")] == ["", "restart 1 of 5"]
    assert deaths(run, "controller-0")[-1].exit_code == 0


def test_a_stopped_worker_that_the_controller_lost_is_replaced(run: RunFolder, tmp_path: Path) -> None:
    # given a worker that stops itself, and another that only computes long
    done = tmp_path / "done"
    stops = dies_until(
        tmp_path / "n", 1, "os.kill(os.getpid(), signal.SIGSTOP)", f"open({str(done)!r}, 'w'); time.sleep(60)"
    )
    pids: set[int] = set()

    def tick(supervisor: Supervisor) -> None:
        pids.add(supervisor.alive().get("actor-0", 0))
        stopped = (tmp_path / "n").exists() and not done.exists()
        show(run, supervisor, lost="reward-0" if stopped else "")

    outcome, _ = supervise(
        run,
        program("controller", exits_after(done)),
        program("reward", stops),
        program("actor", "while True: pass"),
        tick=tick,
    )

    assert outcome == Outcome(0)
    [death] = deaths(run, "reward-0", "killed")[:1]
    assert (death.exit_code, death.why) == (-signal.SIGKILL, "silent for 31 s")
    assert len(pids - {0}) == 1


def test_a_lost_worker_that_computes_is_not_killed(run: RunFolder, tmp_path: Path) -> None:
    # given a worker that is silent because it computes, and later stops
    done, stop = tmp_path / "done", tmp_path / "stop"
    began = time.monotonic()
    code = dies_until(
        tmp_path / "n",
        1,
        f"while not os.path.exists({str(stop)!r}): pass\n    os.kill(os.getpid(), signal.SIGSTOP)",
        f"open({str(done)!r}, 'w'); time.sleep(60)",
    )

    def tick(supervisor: Supervisor) -> None:
        show(run, supervisor, lost="" if done.exists() else "reward-0")
        if time.monotonic() - began > 8.0 and not stop.exists():
            assert not deaths(run, "reward-0", "killed")
            stop.touch()

    supervise(run, program("controller", exits_after(done)), program("reward", code), tick=tick)

    # then it is killed only when it has stopped
    assert [d.why for d in deaths(run, "reward-0", "killed")][:1] == ["silent for 31 s"]


def test_a_snapshot_of_another_controller_kills_nobody(run: RunFolder, tmp_path: Path) -> None:
    # given a snapshot of a controller that is gone, in which a worker is lost
    done = tmp_path / "done"
    shown: list[int] = []

    def tick(supervisor: Supervisor) -> None:
        show(run, supervisor, lost="reward-0")
        old = msgspec.json.decode(run.control.read_bytes(), type=Snapshot)
        run.control.write_bytes(msgspec.json.encode(msgspec.structs.replace(old, pid=old.pid + 1)))
        shown.append(1)
        if len(shown) > 20:
            done.touch()

    supervise(run, program("controller", exits_after(done)), program("reward", SLEEPS), tick=tick)

    assert [d.why for d in deaths(run, "reward-0", "killed")] in ([], ["did not end in time"])


def test_a_worker_that_left_while_the_run_goes_on_is_started_again(run: RunFolder, tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = dies_until(tmp_path / "n", 1, "sys.exit(0)", f"open({str(done)!r}, 'w'); time.sleep(60)")

    outcome, _ = supervise(
        run, program("controller", exits_after(done)), program("reward", code), tick=lambda s: show(run, s)
    )

    assert outcome == Outcome(0)
    assert [d.why for d in deaths(run, "reward-0", "started")] == ["", "it had left"]


def test_a_worker_that_left_because_the_run_ends_is_not_started_again(run: RunFolder) -> None:
    outcome, _ = supervise(
        run,
        program("controller", "import time; time.sleep(5)"),
        program("reward", "pass"),
        tick=lambda s: show(run, s, phase="stop"),
    )

    assert outcome == Outcome(0)
    assert len(deaths(run, "reward-0", "started")) == 1


def test_a_worker_that_was_dismissed_is_started_again_for_the_next_controller(
    run: RunFolder, tmp_path: Path
) -> None:
    # given a controller that dies when it has told its workers to stop, and a worker that has stopped
    back, killed = tmp_path / "back", tmp_path / "killed"
    worker = dies_until(tmp_path / "n", 1, "sys.exit(0)", f"open({str(back)!r}, 'w'); time.sleep(60)")
    first = "time.sleep(4); os.kill(os.getpid(), signal.SIGKILL)"
    controller = dies_until(
        killed, 1, first, f"[time.sleep(0.05) for _ in range(1200) if not os.path.exists({str(back)!r})]"
    )

    # when the next one wants it
    outcome, _ = supervise(
        run,
        program("controller", controller),
        program("reward", worker),
        tick=lambda s: show(run, s, phase="run" if len(deaths(run, "controller-0", "started")) > 1 else "stop"),
    )

    assert outcome == Outcome(0)
    assert len(deaths(run, "reward-0", "started")) == 2


def test_a_controller_that_is_stopped_for_good_is_replaced(run: RunFolder, tmp_path: Path) -> None:
    code = dies_until(tmp_path / "n", 1, "os.kill(os.getpid(), signal.SIGSTOP)", "sys.exit(0)")
    supervisor = Supervisor(run, [program("controller", code)], silence_s=-59.0, patience=PATIENCE)

    assert supervisor.run() == Outcome(0)
    assert deaths(run, "controller-0", "killed")[0].why.startswith("no snapshot for")


def test_grandchildren_that_left_their_group_end_with_a_killed_worker(run: RunFolder, tmp_path: Path) -> None:
    # given a worker whose child made a group of its own, and whose grandchild did so too
    pids, done = tmp_path / "pids", tmp_path / "done"
    child = (
        "import os, subprocess, time; p = subprocess.Popen(['sleep', '60'], process_group=0); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}} '); time.sleep(60)"
    )
    code = dies_until(
        tmp_path / "n",
        1,
        f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0)\n"
        f"    while not os.path.exists({str(pids)!r}) or not os.path.getsize({str(pids)!r}): time.sleep(0.02)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)",
        f"open({str(done)!r}, 'w'); time.sleep(60)",
    )

    supervise(run, program("controller", exits_after(done)), program("reward", code))

    for pid in pids.read_text().split():
        wait_until(lambda pid=int(pid): gone(pid), "the grandchild's end")


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (143, 143), (3, 3)])
def test_sigterm_ends_with_0_when_the_controller_did_all_in_time(run: RunFolder, code: int, exit_code: int) -> None:
    controller = (
        f"import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"
        "print('armed', flush=True)\ntime.sleep(60)"
    )
    log = run.logs / "controller-0.log"
    threading.Thread(target=_interrupt_when, args=(lambda: "armed" in _text(log), signal.SIGTERM)).start()

    outcome, _ = supervise(run, program("controller", controller), program("actor", SLEEPS))

    assert outcome.exit_code == exit_code


def test_the_limits_of_the_end_follow_from_the_time_to_drain() -> None:
    patience = Patience.within(20.0)
    assert 20.0 < patience.controller_s < patience.workers_s < patience.everything_s < 25.0


def test_a_program_that_cannot_be_started_ends_what_was_started_before(run: RunFolder) -> None:
    # given a set-up that fails at its last process
    missing = ProcessSpec("actor", 0, ("/does/not/exist",), {})
    server = Server(run, find_binary())
    supervisor = Supervisor(run, [program("controller", SLEEPS), missing], server=server, patience=PATIENCE)

    with pytest.raises(FileNotFoundError, match="/does/not/exist"):
        supervisor.run()

    # then the error is told and nothing is left
    [controller] = deaths(run, "controller-0", "killed")
    assert gone(controller.pid)
    assert server.child is None
    assert not run.sockets.exists()


def test_a_server_that_cannot_be_started_ends_the_run_before_anything_else(run: RunFolder) -> None:
    server = Server(run, Path("/bin/false"))
    supervisor = Supervisor(run, [program("controller", SLEEPS)], server=server, patience=PATIENCE)

    with pytest.raises(DependencyError, match="exit 1"):
        supervisor.run()

    assert not deaths(run, "controller-0", "started")
    assert not run.sockets.exists()


def test_a_budget_is_whole_again_after_a_good_life(run: RunFolder) -> None:
    # given a worker that has used up its restarts but one
    history = History(run)
    guard = Guard(run.sockets)
    run.logs.mkdir()
    process = Supervised(program("actor", "pass"), run, history, guard, Forks((), run.logs / "forks.log", print))
    process.budget.spent.extend([time.monotonic()] * 4)
    # when it ends soon after its start, or in the same step, then that counts
    assert process.spend() is not None
    assert len(process.budget.spent) == 5
    assert process.spend() is None
    # when it has lived for long, while the run went on with the next step, then all is forgotten
    process.start()
    process._started_s -= 60.0
    supervisor = Supervisor(run, [program("controller", "pass")], patience=PATIENCE)
    show(run, supervisor)
    history.look()
    assert process.spend() == 0.0
    assert len(process.budget.spent) == 1
    process.ended(wait=True)
    guard.close()
