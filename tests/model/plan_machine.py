"""The state machine of the plan: what a world may do to a controller, in any order."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from model.plan_world import LOOP, SILENCE_S, STEPS, WORKERS, Broken, World, holds

from rlmq.common.control import FIXED, Order
from rlmq.common.errors import IntegrityError
from rlmq.controller import events, plan

PLACES = [(role, rank) for role, count in WORKERS.items() for rank in range(count)]
WHO = st.sampled_from(PLACES)
INDEX = st.integers(0, 50)


class PlanMachine(RuleBasedStateMachine):
    """Losses, repeats, reorderings, deaths, ghosts, orders, restarts of the controller, an older server."""

    plan: ClassVar[Any] = plan

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.plan)
        self.numbers = 0

    @rule()
    def go_on(self) -> None:
        self.world.ask()

    @rule(moved=st.booleans(), times=st.sampled_from([1, 1, 2, 15]))
    def pass_time(self, moved: bool, times: int) -> None:
        for _ in range(times):
            self.world.tick(moved)
            self.after_failure()

    def after_failure(self) -> None:
        """The supervisor starts a controller that failed again."""
        if self.world.failed:
            self.world.begin()

    @rule(who=WHO, times=st.integers(1, 3))
    def work(self, who: tuple[str, int], times: int) -> None:
        for _ in range(times):
            self.world.work(self.world.processes[who])

    @rule(times=st.integers(1, 3))
    def all_work(self, times: int) -> None:
        for _ in range(times):
            for process in self.world.processes.values():
                self.world.work(process)

    @rule(who=WHO)
    def beat(self, who: tuple[str, int]) -> None:
        self.world.beat(self.world.processes[who])

    @rule()
    def all_beat_and_arrive(self) -> None:
        for process in self.world.processes.values():
            self.world.beat(process)
        while self.world.wire:
            self.world.deliver(self.world.wire.pop(0))
        self.after_failure()

    @precondition(lambda self: self.world.wire)
    @rule(which=INDEX, how=st.sampled_from(["arrives", "arrives", "repeats", "is lost"]))
    def report(self, which: int, how: str) -> None:
        at = which % len(self.world.wire)
        report = self.world.wire[at]
        if how != "repeats":
            del self.world.wire[at]
        if how != "is lost":
            self.world.deliver(report)
            self.after_failure()

    @rule(who=WHO, leaves_ghost=st.booleans())
    def die_and_rejoin(self, who: tuple[str, int], leaves_ghost: bool) -> None:
        self.world.restart(who, leaves_ghost=leaves_ghost)

    @rule(who=WHO)
    def say_goodbye(self, who: tuple[str, int]) -> None:
        process = self.world.processes[who]
        self.world.wire.append(
            events.Left(at=0.0, role=process.role, rank=process.rank, incarnation=process.incarnation, exit_code=75)
        )
        self.world.restart(who, leaves_ghost=False)

    @precondition(lambda self: self.world.ghosts)
    @rule(which=INDEX)
    def ghost_acts(self, which: int) -> None:
        ghost = self.world.ghosts[which % len(self.world.ghosts)]
        self.world.work(ghost)
        self.world.beat(ghost)

    @rule()
    def controller_restarts(self) -> None:
        self.world.begin()

    @rule(back=st.integers(1, 3))
    def older_controller_speaks(self, back: int) -> None:
        world = self.world
        world.feed(
            events.Began(at=world.at, epoch=world.epoch - back, step=1, workers={}, quorum={}, silence_s=SILENCE_S)
        )

    @rule()
    def server_writes_its_file(self) -> None:
        self.world.older.append(copy.deepcopy(self.world.records))

    @rule(which=INDEX)
    def server_comes_back_older(self, which: int) -> None:
        self.world.go_back(which)

    @rule(verb=st.sampled_from(["pause", "resume", "resume", "set"]))
    def order(self, verb: Any) -> None:
        self.numbers += 1
        settings = {"train.steps": str(self.numbers)} if verb == "set" else {}
        self.world.records.orders.append(Order(verb=verb, at_unix_s=self.world.at, settings=settings))

    @rule(number=st.integers(0, 4))
    def order_comes_again(self, number: int) -> None:
        orders = self.world.records.orders
        if number < len(orders):
            self.world.feed(events.Ordered(at=self.world.at, number=number + 1, order=orders[number]))

    @invariant()
    def at_rest(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Every report is lost from now on, and of roles that may come and go one worker only is alive."""
        world = self.world
        if world.broken:
            return
        world.records.orders.append(Order(verb="resume", at_unix_s=world.at))
        alive = [one for one in world.processes.values() if one.role in FIXED or one.rank == 0]
        for _ in range(len(LOOP) * STEPS * (int(SILENCE_S) + 10)):
            world.ask()
            for process in alive:
                world.work(process)
            world.tick(moved=True)
            self.after_failure()
            if world.finished:
                break
        holds("polls_suffice", world.finished, f"step {world.records.step}, {world.state.calls}")
        try:
            holds("replays", self.plan.replay(world.lines) == world.state, "another state")
        except IntegrityError as error:
            raise Broken("replays", error) from error
