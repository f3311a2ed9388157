"""The real actor, killed between two of the things that it does for a step: the run's bits do not change."""

from __future__ import annotations

from typing import Any

import pytest
from integration.test_resume import STEPS, weights

pytestmark = pytest.mark.timeout(240)

DIES = """
import os, signal, sys
words = sys.orig_argv
if "worker" in words and words[words.index("worker") + 1] == "actor":
    from rlmq.buffer.redis_store import RedisStore
    from rlmq.consumers.logged_steps import LoggedSteps

    def dies(owner, method, when, step_of):
        inner = getattr(owner, method)
        def outer(self, *args, **named):
            due = step_of(args, named) == 3 and not os.path.exists(os.environ["RLMQ_TEST_DIED"])
            if due:
                open(os.environ["RLMQ_TEST_DIED"], "w").close()
            if due and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            found = inner(self, *args, **named)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        setattr(owner, method, outer)

    method, when = os.environ["RLMQ_TEST_POINT"].split()
    if method == "append":
        dies(LoggedSteps, method, when, lambda args, named: args[0].step)
    elif method == "finish":
        dies(RedisStore, method, when, lambda args, named: named.get("step"))
    else:
        dies(RedisStore, method, when, lambda args, named: args[0])
"""


@pytest.fixture(scope="module")
def undisturbed(module_cli: Any) -> str:
    """The weights after six steps without any disturbance."""
    done = module_cli.run("up", module_cli.tiny, STEPS, "run.name=calm", "checkpoint.every_steps=3")
    assert done.code == 0, done.text
    return weights(module_cli.newest_run("calm"), 6)


@pytest.mark.parametrize(
    "point",
    [
        "append before",  # advantages are written, nothing is logged
        "append after",  # logged, and the rows are still the claim's
        "finish after",  # the rows are trained for the server, the weights are not yet
        "advance before",  # the checkpoint is there, the server does not know
    ],
)
def test_the_actor_dies_between_two_things_of_a_step(
    cli: Any, undisturbed: str, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    # given an actor that is killed -9 in its third step, once, at this point
    died = cli.folder / "died"
    (cli.folder / "code").mkdir()
    (cli.folder / "code" / "sitecustomize.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", str(cli.folder / "code"))
    monkeypatch.setenv("RLMQ_FORK_SERVER", "0")  # each process has a start of its own
    monkeypatch.setenv("RLMQ_TEST_POINT", point)
    monkeypatch.setenv("RLMQ_TEST_DIED", str(died))
    # when the run is started
    done = cli.run("up", cli.tiny, STEPS, "run.name=point", "checkpoint.every_steps=3", timeout_s=200)
    # then it was killed, and the run ends well, with the undisturbed run's weights
    assert died.exists()
    assert done.code == 0, done.text
    assert weights(cli.newest_run("point"), 6) == undisturbed
