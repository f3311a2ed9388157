"""The plan's decisions, one by one; the state machine in tests/model has them in every order."""

from __future__ import annotations

import msgspec
import pytest

from rlmq.common.control import Order
from rlmq.common.errors import ExitCode, IntegrityError
from rlmq.controller import events, plan
from rlmq.controller.control_files import ControlFiles, read_control_log

WORKERS = {"prompts": 1, "rollout": 2, "reward": 2, "actor": 2, "recorder": 1}
QUORUM = {"prompts": 1, "rollout": 1, "reward": 1, "actor": 2, "recorder": 1}


class Story:
    """Events one after the other, as a log would have them."""

    def __init__(self, **began):
        self.state = plan.State()
        self.lines = []
        given = {"epoch": 1, "step": 1, "workers": WORKERS, "quorum": QUORUM, "silence_s": 5.0, **began}
        self.tell(events.Began(at=0.0, **given))

    def tell(self, event):
        self.state, commands = plan.advance(self.state, event)
        self.lines.append(events.Line(at=event.at, epoch=1, event=event, commands=commands))
        return commands

    def hear(self, *names, at=1.0, incarnation=1, ready=True):
        for name in names:
            role, _, rank = name.rpartition("-")
            self.tell(events.Heard(at=at, role=role, rank=int(rank), incarnation=incarnation, ready=ready))

    def ask(self, role="reward", ranks=None, at=1.0, deadline_s=60.0, method="score"):
        call_id = f"1/1/{role}.{method}"
        asked = events.Asked(at=at, call_id=call_id, role=role, method=method, ranks=ranks, deadline_s=deadline_s)
        return call_id, self.tell(asked)

    def look(self, call_id, ranks, answered=(), known=True):
        return self.tell(
            events.Looked(at=2.0, call_id=call_id, known=known, ranks=tuple(ranks), answered=tuple(answered))
        )

    def order(self, verb, at=10.0, **settings):
        order = Order(verb=verb, at_unix_s=at, settings=settings)
        return self.tell(events.Ordered(at=at, number=self.state.orders + 1, order=order))


def kinds(commands):
    return [type(one).__name__ for one in commands]


def test_a_run_lacks_those_roles_that_have_no_quorum():
    story = Story()
    assert set(plan.lacking(story.state)) == set(plan.missing(story.state))
    story.hear("prompts-0", "rollout-1", "reward-0", "recorder-0", "actor-0")
    assert plan.lacking(story.state) == ("actor-1",)
    assert plan.missing(story.state) == ("rollout-0", "reward-1", "actor-1")
    story.hear("actor-1", ready=False)
    assert plan.lacking(story.state) == ("actor-1",)
    story.hear("actor-1")
    assert plan.lacking(story.state) == ()


def test_everyone_of_a_role_that_may_come_and_go_is_who_is_there():
    story = Story()
    story.hear("reward-1", "reward-7", "actor-0")
    assert story.ask("reward")[1][0].ranks == (1, 7)
    assert story.ask("actor", method="train")[1][0].ranks == (0, 1)


def test_a_call_that_was_submitted_before_a_restart_keeps_its_ranks():
    story = Story()
    story.hear("reward-1")
    call_id, _ = story.ask("reward")
    [resolve] = story.look(call_id, ranks=(0, 1), answered=(0, 1))
    assert resolve == events.Resolve(call_id=call_id, ranks=(0, 1))


def test_the_records_are_read_when_the_last_rank_has_told():
    story = Story()
    call_id, _ = story.ask("actor", method="train")
    story.look(call_id, ranks=(0, 1))
    assert story.tell(events.Told(at=3.0, call_id=call_id, rank=1)) == ()
    assert kinds(story.tell(events.Told(at=3.0, call_id=call_id, rank=0))) == ["Look"]


@pytest.mark.parametrize("how", ["silence", "goodbye"])
def test_a_worker_that_is_not_there_any_more_is_released(how):
    # given a call to two reward workers
    story = Story()
    story.hear("reward-0", "reward-1")
    call_id, _ = story.ask("reward")
    story.look(call_id, ranks=(0, 1), answered=(0,))
    # when one of them dies
    if how == "silence":
        commands = story.tell(events.Silent(at=7.0, role="reward", rank=1, incarnation=1, since=1.0))
        expected, why = ["Lost", "Release"], "lost"
    else:
        commands = story.tell(events.Left(at=7.0, role="reward", rank=1, incarnation=1, exit_code=75))
        expected, why = ["Release"], "left"
    # then the call does not wait for it
    assert kinds(commands) == expected
    assert commands[-1] == events.Release(call_id=call_id, rank=1, why=why)
    assert kinds(story.look(call_id, ranks=(0, 1), answered=(0, 1))) == ["Resolve"]


def test_a_trainer_rank_that_dies_is_waited_for():
    story = Story()
    story.hear("actor-0", "actor-1")
    story.ask("actor", method="train")
    story.look("1/1/actor.train", ranks=(0, 1), answered=(0,))
    assert kinds(story.tell(events.Silent(at=7.0, role="actor", rank=1, incarnation=1, since=1.0))) == ["Lost"]
    assert kinds(story.tell(events.Tick(at=8.0, moved_at=7.0))) == ["Look"]
    story.hear("actor-1", at=9.0, incarnation=2)
    assert kinds(story.look("1/1/actor.train", ranks=(0, 1), answered=(0, 1))) == ["Resolve"]


def test_a_deadline_names_who_is_silent_and_who_is_missing():
    story = Story()
    story.hear("actor-0", "rollout-0")
    story.ask("actor", deadline_s=60.0, method="train")
    story.look("1/1/actor.train", ranks=(0, 1), answered=(0,))
    assert kinds(story.tell(events.Tick(at=100.0, moved_at=41.0))) == ["Look"]
    fail = story.tell(events.Tick(at=102.0, moved_at=41.0))[-1]
    assert fail.exit_code == ExitCode.DEADLINE
    assert "no progress for 61 s: call 1/1/actor.train waits for actor-1" in fail.error
    assert "missing: prompts-0, rollout-1" in fail.error


def test_deadlines_stand_still_while_the_run_is_paused():
    story = Story()
    story.ask("actor", deadline_s=60.0, method="train")
    story.order("pause", at=20.0)
    assert kinds(story.tell(events.Tick(at=500.0, moved_at=1.0))) == ["Look"]
    [wait] = plan.waits(story.state, moved_at=1.0)
    assert (wait.on, wait.until_unix_s) == (("actor-0", "actor-1"), None)
    story.order("resume", at=500.0)
    assert kinds(story.tell(events.Tick(at=559.0, moved_at=1.0))) == ["Look"]
    assert kinds(story.tell(events.Tick(at=561.0, moved_at=1.0))) == ["Look", "Fail"]


def test_a_pause_reaches_every_role_and_a_drain_lets_them_work():
    story = Story()
    wants = [one.desired for one in story.order("pause") if isinstance(one, events.Want)]
    assert {one.role: one.phase for one in wants} == dict.fromkeys(WORKERS, "pause")
    assert {one.version for one in wants} == {2}
    wants = [one.desired for one in story.order("drain") if isinstance(one, events.Want)]
    assert {one.phase for one in wants} == {"run"}
    assert story.state.phase == "drain"
    assert kinds(story.order("pause"))[-1] == "Refuse"


def test_a_setting_counts_from_the_step_after_the_open_one():
    story = Story()
    story.tell(events.Opened(at=1.0, step=4))
    kept, *wants = story.order("set", **{"reward.letters.weight": "0.5", "evaluate.every_steps": "2"})
    assert kept.settings == {"reward.letters.weight": [(5, "0.5")], "evaluate.every_steps": [(5, "2")]}
    [want] = wants
    assert (want.desired.role, want.desired.settings) == ("reward", {"reward.letters.weight": [(5, "0.5")]})
    assert plan.setting(story.state, "evaluate.every_steps", 4) is None
    assert plan.setting(story.state, "evaluate.every_steps", 5) == 2
    story.tell(events.Opened(at=2.0, step=6))
    story.order("set", **{"evaluate.every_steps": "3"})
    assert [plan.setting(story.state, "evaluate.every_steps", step) for step in (5, 6, 7)] == [2, 2, 3]


@pytest.mark.parametrize(("key", "value"), [("train.lr", "1"), ("train.steps", "many"), ("reward.weight", "1")])
def test_a_setting_that_cannot_be_is_refused(key, value):
    story = Story()
    commands = story.order("set", **{key: value})
    assert kinds(commands) == ["Keep", "Refuse"]
    assert key in commands[-1].why
    assert story.state.settings == {}


def test_what_operators_wanted_outlives_the_controller():
    # given a controller that paused and set
    story = Story()
    story.order("set", **{"train.steps": "9"})
    kept = story.order("pause")[0]
    desired = tuple(story.state.desired.values())
    # when another one begins with what that one kept
    next_one = Story(epoch=2, desired=desired, phase=kept.phase, orders=kept.orders, settings=kept.settings, step=3)
    # then it is paused, and has the setting; versions go on
    assert next_one.state.phase == "pause"
    assert plan.setting(next_one.state, "train.steps", 2) == 9
    assert all(one.version == desired[0].version + 1 for one in next_one.state.desired.values())
    # and an end of the run forgets the pause
    assert next_one.tell(events.Ended(at=9.0, exit_code=130))[0].phase == "run"


def test_a_stop_ends_the_run_as_a_signal_does():
    fail = Story().order("stop")[-1]
    assert fail.exit_code == ExitCode.TERMINATED


def test_an_order_that_comes_while_the_run_ends_is_refused_and_forgotten():
    story = Story()
    story.tell(events.Ended(at=1.0, exit_code=0))
    for verb in ("stop", "pause"):
        kept, refuse = story.order(verb)
        assert (kept.phase, kinds([refuse])) == ("run", ["Refuse"])
    assert story.state.phase == "stop"


def test_a_recorded_log_replays_and_a_changed_one_does_not(tmp_path):
    # given the log of a story, whose last line was cut when its writer died, and which a second writer continued
    from rlmq.common.run_folder import RunFolder

    story = Story()
    story.hear("reward-0", "reward-1")
    call_id, _ = story.ask("reward")
    story.look(call_id, ranks=(0, 1), answered=(0,))
    story.tell(events.Silent(at=7.0, role="reward", rank=1, incarnation=1, since=1.0))
    run = RunFolder(tmp_path)
    run.control_log.write_bytes(msgspec.json.encode(story.lines[0]) + b"\n" + b'{"at": 3, "ep')
    files = ControlFiles(run)
    for line in story.lines[1:]:
        files.append(line)
    files.close()
    # when it is read, then the plan would do the same
    lines = list(read_control_log(run.control_log))
    assert lines == story.lines
    assert plan.replay(lines) == story.state
    # and a line that says otherwise is noticed
    lines[-1] = msgspec.structs.replace(lines[-1], commands=())
    with pytest.raises(IntegrityError, match=f"line {len(lines)} of the control log, Silent"):
        plan.replay(lines)


def test_a_role_that_joined_is_told_what_is_wanted_and_its_end_is_not_the_runs():
    # given a paused run, and a worker of a role that the recipe does not have
    story = Story()
    story.order("pause")
    [want] = story.tell(events.Heard(at=11.0, role="monitor", rank=0, incarnation=1, ready=True))
    assert (want.desired.role, want.desired.phase, want.desired.epoch) == ("monitor", "pause", 1)
    assert "monitor" not in " ".join(plan.missing(story.state))
    # then orders reach it, and the next controller wants it anew: what an earlier epoch wanted is refused
    assert "monitor" in {one.desired.role for one in story.order("resume") if type(one).__name__ == "Want"}
    again = Story(epoch=2, desired=tuple(story.state.desired.values()))
    wanted = {one.desired.role: one.desired for one in again.lines[0].commands if type(one).__name__ == "Want"}
    assert wanted["monitor"].epoch == 2
    assert wanted["monitor"].version > story.state.desired["monitor"].version
    # and an error of it ends nothing
    left = events.Left(at=12.0, role="monitor", rank=0, incarnation=1, exit_code=2, fatal=True, error="own error")
    assert "Fail" not in kinds(story.tell(left))
