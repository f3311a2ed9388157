"""Fault 18: a link that is slow, breaks again and again, or goes silent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.proxy import Proxy
from faults.scene import Scene, until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def proxy(scene: Scene) -> Iterator[Proxy]:
    """Workers reach the server through it; the store that looks on does not."""
    with Proxy(scene.server.socket, scene.rng) as proxy:
        scene.url = proxy.url
        yield proxy
        scene.close()


def _start(scene, chunks):
    scene.start_all(
        rollout1={}, rollout2={}, reward1={}, reward2={}, actor={"rows": 16}, recorder={"rows": 32},
        produce={"chunks": chunks},
    )  # fmt: skip


def test_a_slow_link_makes_the_run_slower_and_nothing_else(scene, proxy):
    scene.open()
    proxy.delay_s = 0.2
    _start(scene, 3)
    scene.until_ended(48)
    assert scene.ended("trained") == 48
    assert scene.counts.redelivered == 0
    scene.check()


def test_a_link_that_is_reset_again_and_again_repeats_and_doubles_nothing(scene, proxy):
    scene.open()
    proxy.delay_s = 0.002
    _start(scene, 8)
    proxy.reset_share = 0.33
    scene.until_ended(128)
    assert scene.ended("trained") == 128
    assert proxy.resets > 10
    assert scene.counts.redelivered == 0
    assert scene.facts("fenced") == [], "a lost answer must not cost the lease"
    proxy.reset_share = 0.0
    scene.check()


def test_a_half_open_link_is_left_and_made_again(scene, proxy):
    scene.open()
    scene.url = proxy.url.replace("socket_timeout=5", "socket_timeout=1")
    _start(scene, 10)
    until(lambda: scene.ended() >= 32, "the first rows ended")
    before = proxy.connections
    proxy.silent = True
    until(lambda: proxy.connections >= before + 3, "workers connect again")
    proxy.silent = False
    scene.until_ended(160)
    assert scene.ended("trained") == 160
    assert scene.counts.redelivered == 0
    scene.check()
