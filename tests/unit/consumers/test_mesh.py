"""The trainer mesh: ranks that come late, die and come again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from rlmq.buffer.redis_calls import RedisCalls

pytestmark = pytest.mark.timeout(200)

RANK = """
import os, sys
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.errors import RestartRequired
from rlmq.consumers.mesh import meet
rank, url = int(sys.argv[1]), sys.argv[2]
calls = RedisCalls(url, run_id="mesh")
incarnation = calls.join("actor", rank, fingerprint="f")
print("joins", flush=True)
try:
    mesh = meet(calls, role="actor", rank=rank, size=2, incarnation=incarnation, timeout_s=100.0)
    print("met", flush=True)
    for line in sys.stdin:
        print(mesh.broadcast(line.strip().encode() if rank == 0 else b"").decode(), flush=True)
except RestartRequired:
    os._exit(75)  # as the product's processes do: gloo's threads may abort what ends slowly
"""


class Rank:
    """One rank as a process."""

    def __init__(self, rank: int, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.reads() == "joins"

    def reads(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def says(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(redis_url: str) -> Iterator[Callable[[int], Rank]]:
    ranks: list[Rank] = []

    def one(rank: int) -> Rank:
        ranks.append(Rank(rank, redis_url))
        return ranks[-1]

    yield one
    for rank in ranks:
        rank.kill()


def test_a_rank_that_finds_the_address_of_a_mesh_that_is_gone_waits_for_the_next(
    start: Callable[[int], Rank], redis_url: str
) -> None:
    # given the note that a dead rank 0 left, and a rank that came first
    calls = RedisCalls(redis_url, run_id="mesh")
    calls.note("actor_mesh", {"port": 1})
    other = start(1)
    # when rank 0 comes, then they meet
    first = start(0)
    assert (first.reads(), other.reads()) == ("met", "met")
    for rank in (first, other):
        rank.says("hello")
    assert (first.reads(), other.reads()) == ("hello", "hello")
    calls.close()


def test_a_mesh_whose_rank_was_killed_meets_anew_without_waiting_for_a_time_out(
    start: Callable[[int], Rank],
) -> None:
    # given a mesh
    first, other = start(0), start(1)
    assert (first.reads(), other.reads()) == ("met", "met")
    # when a rank is killed and another process takes its place before rank 0 has noticed
    other.kill()
    other = start(1)
    # then rank 0 leaves at its next collective, and the next rank 0 meets the one that waits
    first.says("lost")
    assert first.process.wait(timeout=60) == 75
    first = start(0)
    assert (first.reads(), other.reads()) == ("met", "met")
    for rank in (first, other):
        rank.says("again")
    assert (first.reads(), other.reads()) == ("again", "again")
