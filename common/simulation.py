"""A run's schedule as discrete events: how long its steps would take on devices that nobody here has.

Devices generate with continuous batching (an iteration gives each active response a token) and train in the time
of the step's tokens. Rows are admitted, weights published and steps trained by the rules of docs/staleness.md; a
free slot takes the next row of the queue, at the device that has the fewest. Nothing else takes time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlmq.common.errors import UsageError

SCHEDULES = {"sync": (0, False), "one_step_off": (1, False), "async": (1, True)}
"""Staleness, and whether weights come into responses; `async` with its least."""
_WARM = 2  # steps that fill the pipeline, and are not counted


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of an iteration, more for each active response, of training on a token on one device, of a weight
    sync; `most_active`: responses of a device at once."""

    iteration_s: float = 0.02
    active_s: float = 0.0001
    token_s: float = 0.00034
    sync_s: float = 0.0
    most_active: int = 256


@dataclass(frozen=True, slots=True)
class Arm:
    """A schedule and its devices. `shared`: the same devices generate and then train (staleness 0)."""

    staleness: int
    generation: int
    training: int
    interrupts: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out.

    `ends`: when each step was trained and published, in seconds. `busy`: shares of the time after the warm-up in
    which generating devices had a response, and in which the trainer worked. `staleness`: mean of the rows.
    """

    arm: Arm
    ends: tuple[float, ...]
    busy: tuple[float, float]
    staleness: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, in the mean after the warm-up."""
        warm = min(_WARM, len(self.ends) - 1)
        return (self.ends[-1] - self.ends[warm - 1]) / (len(self.ends) - warm) if warm else self.ends[-1]

    @property
    def bottleneck(self) -> float:
        """Share of the time in which the busier side worked."""
        return sum(self.busy) if self.arm.shared else max(self.busy)


@dataclass(slots=True)
class _Device:
    at: float = 0.0
    progress: float = 0.0  # tokens that every response here since the beginning would have
    active: list[tuple[float, int, int]] = field(
        default_factory=list
    )  # heap of (progress at its end, step, version)
    busy_s: float = 0.0
    epoch: int = 0  # of its next end, which any change moves


class _Cluster:
    """One simulation's state."""

    def __init__(self, steps: Sequence[Sequence[int]], arm: Arm, costs: Costs) -> None:
        self.steps, self.arm, self.costs = steps, arm, costs
        self.now = 0.0
        self.devices = [_Device() for _ in range(arm.generation)]
        self.queue: deque[tuple[int, int]] = deque()
        self.left = [len(lengths) for lengths in steps]
        self.admitted = self.version = 0
        self.training = self.syncing = False
        self.order = itertools.count()
        self.events: list[tuple[float, int, str, int, int]] = []
        self.ends: list[float] = []
        self.trained_s = 0.0
        self.staleness: list[int] = []
        self.warm = (0.0, 0.0, 0.0)  # time, busy seconds of either side, at the end of the warm-up

    def run(self) -> Simulated:
        self._admit()
        while self.events:
            self.now, _, what, number, epoch = heapq.heappop(self.events)
            if what == "end" and self.devices[number].epoch == epoch:
                self._end_of(number)
            elif what == "trained":
                self.training = False
                self._publish()
            elif what == "published":
                self._published()
        began, generated, trained = self.warm
        span = max(self.now - began, 1e-9)
        for device in self.devices:
            self._move(device)
        share = (sum(device.busy_s for device in self.devices) - generated) / span / len(self.devices)
        mean = sum(self.staleness) / max(1, len(self.staleness))
        return Simulated(self.arm, tuple(self.ends), (share, (self.trained_s - trained) / span), mean)

    def _after(self, seconds: float, what: str, number: int = 0, epoch: int = 0) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what, number, epoch))

    def _admit(self) -> None:
        while self.admitted < len(self.steps) and self.admitted <= self.version + self.arm.staleness:
            self.queue.extend((self.admitted, length) for length in self.steps[self.admitted])
            self.admitted += 1
        self._fill(range(len(self.devices)))

    def _fill(self, numbers: Sequence[int]) -> None:
        """Free slots of these devices take rows, fewest active first; not between two versions."""
        if self.syncing or not self.queue:
            return
        most = self.costs.most_active
        room = [(len(self.devices[i].active), i) for i in numbers if len(self.devices[i].active) < most]
        heapq.heapify(room)
        changed = set()
        while self.queue and room:
            count, number = heapq.heappop(room)
            device = self.devices[number]
            if number not in changed:
                self._move(device)
                changed.add(number)
            step, length = self.queue.popleft()
            heapq.heappush(device.active, (device.progress + length, step, self.version))
            if count + 1 < most:
                heapq.heappush(room, (count + 1, number))
        for number in changed:
            self._plan(number)

    def _iteration_s(self, device: _Device) -> float:
        return self.costs.iteration_s + self.costs.active_s * len(device.active)

    def _move(self, device: _Device) -> None:
        """Bring a device to now."""
        if device.active and self.now > device.at:
            device.progress += (self.now - device.at) / self._iteration_s(device)
            device.busy_s += self.now - device.at
        device.at = max(device.at, self.now)

    def _plan(self, number: int) -> None:
        device = self.devices[number]
        device.epoch += 1
        if device.active:
            tokens = max(0.0, device.active[0][0] - device.progress)
            begin_s = max(0.0, device.at - self.now)  # it is paused until then
            self._after(begin_s + tokens * self._iteration_s(device), "end", number, device.epoch)

    def _end_of(self, number: int) -> None:
        device = self.devices[number]
        self._move(device)
        while device.active and device.active[0][0] <= device.progress + 1e-6:
            _, step, version = heapq.heappop(device.active)
            self.left[step] -= 1
            self.staleness.append(step - version)
        self._plan(number)
        self._fill([number])  # every other device is full, or the queue is empty
        if self.syncing and not self.training:
            self._publish()
        self._train()

    def _train(self) -> None:
        step = len(self.ends)
        if self.training or self.syncing or step >= len(self.steps) or self.left[step]:
            return
        self.training = True
        seconds = sum(self.steps[step]) * self.costs.token_s / self.arm.training
        self.trained_s += seconds
        self._after(seconds, "trained")

    def _publish(self) -> None:
        """Weights go out: into what is generated, or when all of it has ended."""
        self.syncing = True
        if not self.arm.interrupts and any(device.active for device in self.devices):
            return
        for number, device in enumerate(self.devices):
            self._move(device)
            device.at = self.now + self.costs.sync_s
            self._plan(number)
        self._after(self.costs.sync_s, "published")

    def _published(self) -> None:
        if not self.syncing:
            return
        self.syncing = False
        self.version += 1
        self.ends.append(self.now)
        if len(self.ends) == min(_WARM, len(self.steps) - 1):
            for device in self.devices:
                self._move(device)
            self.warm = (self.now, sum(device.busy_s for device in self.devices), self.trained_s)
        self._admit()
        self._train()


def simulate(steps: Sequence[Sequence[int]], arm: Arm, costs: Costs) -> Simulated:
    """Run a schedule.

    Args:
        steps: response lengths of each step, in tokens.
        arm: schedule and devices.
        costs: of the devices.

    Raises:
        UsageError: no step, an empty one, no devices, or devices that are shared by an arm that runs ahead.
    """
    if not steps or not all(steps):
        raise UsageError("lengths", got="a step without responses", expected="at least one step, none empty")
    if arm.generation < 1 or arm.training < 1 or (arm.shared and arm.staleness):
        raise UsageError("devices", got=str(arm), expected="some that generate and some that train; shared: sync")
    return _Cluster(steps, arm, costs).run()


def splits(devices: int, staleness: int, *, interrupts: bool) -> Iterator[Arm]:
    """The arms that a schedule can be on so many devices: all in turn where it is synchronous, else by 16ths."""
    if staleness == 0:
        yield Arm(0, devices, devices, shared=True)
        return
    for generation in sorted({max(1, min(devices - 1, round(devices * share / 16))) for share in range(2, 15)}):
        yield Arm(staleness, generation, devices - generation, interrupts)


def best(
    steps: Sequence[Sequence[int]], devices: int, costs: Costs, staleness: int, *, interrupts: bool
) -> Simulated:
    """The fastest split of a schedule's devices."""
    arms = splits(devices, staleness, interrupts=interrupts)
    return min((simulate(steps, arm, costs) for arm in arms), key=lambda found: found.step_s)
