"""Control loops over real records, sockets and workers that only echo: killed anywhere, ordered about, fenced."""

from __future__ import annotations

import contextlib
import select
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from conftest import eventually

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.buffer.redis_store import RedisStore
from rlmq.common import worker_loop
from rlmq.common.calls import Call, CallRecord, Desired
from rlmq.common.control import Order, Snapshot
from rlmq.common.errors import ControlLoopDiverged, Fenced, Terminated
from rlmq.common.logs import configure
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.controller import dispatch as dispatch_module
from rlmq.controller import plan
from rlmq.controller.control_files import read_control_log
from rlmq.controller.dispatch import EPOCH_LEASE_S, Dispatch
from rlmq.controller.steering import RunSteering
from rlmq.controller.trackers import Trackers

STEPS = 3
LOG = configure("controller", 0)
RECIPE = Recipe.model_validate_json(
    '{"run": {"name": "loop"}, "model": "m", "data": {"train": "t"}, "reward": [{"function": "r.py:f"}],'
    ' "train": {"steps": 3}, "checkpoint": {"every_steps": 2}, "placement": {"reward": {"workers": 2}},'
    ' "deadlines": {"silence_s": 1.5, "step_s": 30}}'
)
Loop = Callable[[RunSteering], None]


class Echo:
    """Answers every method with what it was given and how often it was asked at all."""

    def __init__(self, context: WorkerContext, done: Counter[str]) -> None:
        self._context = context
        self._done = done

    def handlers(self) -> Mapping[str, CallHandler]:
        names = ("describe", "admit", "score", "train", "checkpoint")
        return {name: self._answer(name) for name in names}

    def _answer(self, name: str) -> CallHandler:
        def answer(args: Mapping[str, Any]) -> dict[str, Any]:
            self._done[f"{self._context.role}-{self._context.rank} {name} {sorted(args.items())}"] += 1
            return {"samples": 4, "steps": None, "logged": -1, "trained": 0, "rank": self._context.rank, **args}

        return answer

    def work(self) -> bool:
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        select.select([wake_fd], [], [], timeout_s)

    def close(self) -> None:
        pass


class Scene:
    """A run's records, folder and echo workers on threads; controllers come and go."""

    def __init__(self, url: str, folder: Path, run_id: str) -> None:
        self.url, self.run_id = url, run_id
        self.run = RunFolder(folder)
        self.calls = RedisCalls(url, run_id=run_id)
        self.store = RedisStore(url, run_id=run_id, worker="controller-0")
        self.done: Counter[str] = Counter()
        self.loop_calls: RedisCalls = self.calls
        self._threads: list[threading.Thread] = []

    def start(self, *places: tuple[str, int]) -> None:
        for role, rank in places or (("prompts", 0), ("reward", 0), ("reward", 1), ("actor", 0)):
            calls = RedisCalls(self.url, run_id=self.run_id)
            worker = worker_loop.Worker(RECIPE, self.run.path, self.run, role, rank, calls, "f", LOG)
            make = lambda context: Echo(context, self.done)  # noqa: E731
            thread = threading.Thread(target=worker.run, args=(make,), daemon=True)
            thread.start()
            self._threads.append(thread)

    @contextlib.contextmanager
    def controller(self) -> Iterator[RunSteering]:
        """A controller from its epoch on; leaving it is its death: nothing is told to anybody."""
        epoch = self.calls.begin_epoch(fingerprint="f", lease_s=60)
        dispatch = Dispatch(RECIPE, self.run, self.loop_calls, epoch, LOG)
        trackers = Trackers(RECIPE, self.run, LOG)
        steering = RunSteering(RECIPE, self.run, dispatch, self.store, self.loop_calls, trackers, LOG)
        try:
            yield steering
        finally:
            dispatch.close()
            trackers.close()
            self.calls.end_epoch(epoch)

    def follow(self, loop: Loop) -> None:
        with self.controller() as steering:
            steering.prepare()
            loop(steering)

    def trained(self) -> set[str]:
        return {one for one in self.done if one.startswith("actor-0 train")}

    def order(self, verb: Any, **settings: str) -> None:
        self.calls.order(Order(verb=verb, at_unix_s=0.0, settings=settings))

    def snapshot(self) -> Snapshot:
        return msgspec.json.decode(self.run.control.read_bytes(), type=Snapshot)

    def restart(self) -> None:
        self._join()
        self.start()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=20)
            assert not thread.is_alive()
        self._threads.clear()

    def end(self) -> None:
        for role in RECIPE.workers():
            self.calls.want(Desired(role=role, version=10_000, phase="stop", epoch=1_000_000))
        self._join()
        self.calls.close()
        self.store.close()


@pytest.fixture
def scene(redis_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Scene]:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers belong to the main thread
    with tempfile.TemporaryDirectory(prefix="rlmq-loop-") as folder:
        made = Scene(redis_url, Path(folder), f"loop-{abs(hash(request.node.name))}")
        yield made
        made.end()


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who missed a message looks soon."""
    monkeypatch.setattr(worker_loop, "_POLL_S", 0.05)
    monkeypatch.setattr(dispatch_module, "_POLL_S", 0.05)
    monkeypatch.setattr(dispatch_module, "_SHOW_S", 0.05)


def script(run: RunSteering) -> None:
    """An imperative loop: what it asks for depends on what it was answered."""
    for step in run.steps():
        samples = run.admit(step)
        scores = run.call("reward", "score", {"step": step, "samples": samples}, ranks=[0, 1])
        run.call("actor", "train", {"step": step, "scored": [score["rank"] for score in scores]})
        run.checkpoint(step)


class Killed(BaseException):
    """The controller was killed."""


class KillingCalls(RedisCalls):
    """Records that end their controller, once before and once after each thing that it does to them."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id=run_id)
        self.killed: set[tuple[str, str, str]] = set()

    def _pass(self, when: str, verb: str, what: object) -> None:
        point = (when, verb, str(what))
        if point not in self.killed and "describe" not in str(
            what
        ):  # its id has the epoch: there is no end of them
            self.killed.add(point)
            raise Killed(point)

    def submit(self, call: Call) -> CallRecord:
        self._pass("before", "submit", call.id)
        record = super().submit(call)
        self._pass("after", "submit", call.id)
        return record

    def look(self, call_id: str) -> CallRecord | None:
        record = super().look(call_id)
        self._pass("after", "look", call_id)
        return record

    def note(self, name: str, value: dict[str, Any], *, epoch: int | None = None) -> None:
        self._pass("before", "note", (name, value))
        super().note(name, value, epoch=epoch)
        self._pass("after", "note", (name, value))


@pytest.mark.timeout(300)
def test_a_loop_that_is_killed_at_every_boundary_comes_to_the_same_end(scene: Scene, quick_polls: None) -> None:
    # given workers, and records that kill the controller once before and once after each thing that it does
    scene.start()
    scene.loop_calls = killing = KillingCalls(scene.url, scene.run_id)
    # when controllers follow the loop until one comes to its end
    for _ in range(400):
        with contextlib.suppress(Killed):
            scene.follow(script)
            break
    else:
        pytest.fail("no controller came to the end")
    # then each was killed, every call was carried out once, and the results went from one to the next
    killed = Counter(f"{when} {verb}" for when, verb, _ in killing.killed)
    assert killed["before submit"] == killed["after submit"] == 3 * STEPS + 2
    assert killed["before note"] == killed["after note"] == STEPS + 1
    assert {count for what, count in scene.done.items() if "describe" not in what} == {1}, scene.done
    assert scene.trained() == {f"actor-0 train {[('scored', [0, 1]), ('step', s)]}" for s in range(1, STEPS + 1)}
    assert scene.calls.noted("open_step") == {"step": STEPS + 1, "begun": False}
    # and the log of all these controllers replays
    state = plan.replay(read_control_log(scene.run.control_log))
    assert state.epoch > 2 * killed["after submit"]
    killing.close()


def test_a_loop_that_asks_for_something_else_after_a_restart_is_refused(scene: Scene, quick_polls: None) -> None:
    # given a loop that was killed in its first step
    scene.start()

    def first(run: RunSteering) -> None:
        for step in run.steps():
            run.call("actor", "train", {"step": step, "rate": 1})
            raise Killed

    with pytest.raises(Killed):
        scene.follow(first)

    # when another body follows under the same ids
    def second(run: RunSteering) -> None:
        for step in run.steps():
            run.call("actor", "train", {"step": step, "rate": 2})

    with pytest.raises(ControlLoopDiverged, match=r"1/1/actor\.train"):
        scene.follow(second)


def test_a_loop_with_lost_reports_and_doorbells_comes_to_the_same_end(scene: Scene, quick_polls: None) -> None:
    scene.start()
    with scene.controller() as run:
        bus = run._dispatch.bus
        bus.reports = lambda: (bus.wake.clear(), [])[1]  # type: ignore[method-assign,func-returns-value]
        bus.ring = lambda role, bell: None  # type: ignore[method-assign]
        run.prepare()
        script(run)
    assert set(scene.done.values()) == {1}
    assert len(scene.trained()) == STEPS


# -- who comes and goes --------------------------------------------------------------------------------


def test_a_call_to_a_worker_that_never_comes_is_released(scene: Scene, quick_polls: None) -> None:
    scene.start(("prompts", 0), ("reward", 0), ("actor", 0))
    with scene.controller() as run:
        run.prepare()
        scores = run.call("reward", "score", {"step": 1}, ranks=[0, 1])
    assert [score["rank"] for score in scores] == [0]
    record = scene.calls.look("0/1/reward.score")
    assert record is not None
    assert [(one.rank, one.released) for one in record.results] == [(0, ""), (1, "never heard")]


def test_everyone_is_who_is_there_also_beyond_the_recipe(scene: Scene, quick_polls: None) -> None:
    scene.start(("prompts", 0), ("reward", 1), ("reward", 5), ("actor", 0))
    with scene.controller() as run:
        await_ready(run, "reward-1", "reward-5")
        scores = run.call("reward", "score", {"step": 1})
    assert [score["rank"] for score in scores] == [1, 5]
    # and a controller that finds others there asks the same
    with scene.controller() as run:
        assert run.call("reward", "score", {"step": 1}) == scores


def test_a_worker_that_falls_silent_is_told_as_lost(scene: Scene, quick_polls: None) -> None:
    scene.start()
    with scene.controller() as run:
        await_ready(run, "reward-0", "reward-1")
        dispatch = run._dispatch
        # when nothing is heard of one of them any more
        reports = dispatch.bus.reports
        dispatch.bus.reports = lambda: [  # type: ignore[method-assign]
            one for one in reports() if (getattr(one, "role", ""), getattr(one, "rank", 0)) != ("reward", 1)
        ]
        pump_until(run, lambda: dispatch.state.members["reward", 1].lost)
        dispatch.show()
    lost = {one.name: one.lost for one in scene.snapshot().members}
    assert lost == {"prompts-0": False, "reward-0": False, "reward-1": True, "actor-0": False}
    assert "reward-1" in scene.snapshot().missing


# -- orders --------------------------------------------------------------------------------


def test_a_paused_loop_stands_still_and_goes_on_where_it_was(scene: Scene, quick_polls: None) -> None:
    scene.start()
    seen: list[str] = []

    def loop(run: RunSteering) -> None:
        for step in run.steps():
            run.call("actor", "train", {"step": step})
            if step == 1:
                scene.order("pause")
                pump_until(run, lambda: run._dispatch.state.phase == "pause")
                threading.Timer(0.5, lambda: (seen.extend(scene.trained()), scene.order("resume"))).start()

    scene.follow(loop)
    assert len(seen) == 1
    assert len(scene.trained()) == STEPS
    wanted = scene.calls.wanted("reward")
    assert wanted is not None
    assert wanted.phase == "run"


def test_a_drained_run_finishes_its_step_and_goes_on_later(scene: Scene, quick_polls: None) -> None:
    # given a run that is drained in its second step, whose controller is killed then
    scene.start()

    def killed(run: RunSteering) -> None:
        for step in run.steps():
            if step == 2:
                scene.order("drain")
                pump_until(run, lambda: run._dispatch.state.phase == "drain")
                raise Killed
            run.call("actor", "train", {"step": step})

    def loop(run: RunSteering) -> None:
        for step in run.steps():
            run.call("actor", "train", {"step": step})

    with pytest.raises(Killed):
        scene.follow(killed)
    # when the next one follows the loop to its end
    with scene.controller() as run:
        run.prepare()
        loop(run)
        run._dispatch.dismiss(0, timeout_s=0.0)
    # then that step was finished and saved, and no further one begun
    assert len(scene.trained()) == 2
    assert [one for one in scene.done if "checkpoint" in one and "('step', 2)" in one]
    assert scene.calls.noted("open_step") == {"step": 3, "begun": False}
    # and later the same loop goes on
    scene.restart()
    scene.follow(loop)
    assert len(scene.trained()) == STEPS


def test_settings_count_from_the_next_step_also_in_a_redo(scene: Scene, quick_polls: None) -> None:
    scene.start()

    def loop(run: RunSteering) -> None:
        for step in run.steps():
            if step == 2 and not run._dispatch.state.orders:
                scene.order("set", **{"train.steps": "5", "checkpoint.every_steps": "1"})
                pump_until(run, lambda: run._dispatch.state.orders == 1)
                raise Killed
            run.call("actor", "train", {"step": step})
            run.checkpoint(step)

    with pytest.raises(Killed):
        scene.follow(loop)
    scene.follow(loop)
    assert len(scene.trained()) == 5
    saved = [
        step for step in range(1, 6) if any("checkpoint" in o and f"('step', {step})" in o for o in scene.done)
    ]
    assert saved == [2, 3, 4, 5]


def test_a_stop_ends_the_loop_as_sigterm_does(scene: Scene, quick_polls: None) -> None:
    scene.start()
    with scene.controller() as run:
        scene.order("stop")
        with pytest.raises(Terminated, match="order to stop"):
            pump_until(run, lambda: False)
    # and a controller that comes later does not stop for it
    scene.follow(script)
    assert len(scene.trained()) == STEPS


# -- two controllers --------------------------------------------------------------------------------


def test_a_controller_that_was_stopped_past_its_lease_writes_nothing(scene: Scene, quick_polls: None) -> None:
    # given a controller that did not run while another took over, and cannot know it
    scene.start()
    epoch = scene.calls.begin_epoch(fingerprint="f", lease_s=60)
    first = Dispatch(RECIPE, scene.run, scene.calls, epoch, LOG)
    try:
        scene.calls.end_epoch(epoch)
        second = scene.calls.begin_epoch(fingerprint="f", lease_s=60)
        scene.calls.note("open_step", {"step": 7, "begun": True}, epoch=second)
        shown = scene.snapshot() if scene.run.control.exists() else None
        # when it goes on, then each thing that it does is refused
        first._renewed_at -= 2 * EPOCH_LEASE_S
        with pytest.raises(Fenced):
            first.pump()
        for act in (
            lambda: first.want("rollout", 3),
            lambda: first.submit("1/1/actor.train", "actor", "train", {}, deadline_s=5.0),
            lambda: first.open_step(1, begun=True),
            lambda: first.dismiss(0, timeout_s=1.0),
        ):
            with pytest.raises(Fenced, match=f"epoch {epoch}"):
                act()
        assert scene.calls.noted("open_step") == {"step": 7, "begun": True}
        assert scene.calls.look("1/1/actor.train") is None
        assert (scene.snapshot() if scene.run.control.exists() else None) == shown
    finally:
        first.close()


def test_a_server_that_came_back_older_learns_the_epoch_again(scene: Scene) -> None:
    epoch = scene.calls.begin_epoch(fingerprint="f", lease_s=60)
    with redis.Redis.from_url(scene.url) as client:
        client.hset(f"rlmq:{{{scene.run_id}}}:controller", "epoch", epoch - 1)
    scene.calls.renew_epoch(epoch, 60)
    assert scene.calls.controller()[0] == epoch


# -- helpers --------------------------------------------------------------------------------


def await_ready(run: RunSteering, *names: str) -> None:
    state = lambda: run._dispatch.state  # noqa: E731
    pump_until(run, lambda: set(names) <= {one.name for one in plan.present(state()) if one.ready})


def pump_until(run: RunSteering, condition: Callable[[], bool]) -> None:
    def pumped() -> bool:
        run._dispatch.pump()
        return condition()

    eventually(pumped, "the condition that the controller waits for", timeout_s=30.0)
