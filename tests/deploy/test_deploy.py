"""`rlmq deploy`: what it renders is what `deploy/` shows; systemd takes its units, and their commands start."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmq.cli_deploy import deploy_command
from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.deploying.render import KINDS

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "recipes" / "demo.yaml"
UNITS = ("rlmq.target", "rlmq-redis.service", "rlmq-controller.service", "rlmq@rollout-0.service")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_examples_are_what_is_rendered_for_the_demo(kind: str) -> None:
    shown = ROOT / "deploy" / kind
    files = {str(path.relative_to(shown)): path.read_text() for path in shown.rglob("*") if path.is_file()}
    assert files == KINDS[kind](load_recipe(DEMO)), f"rlmq deploy {kind} recipes/demo.yaml -o deploy/{kind}"


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units of the demo where systemd finds their programs and folders."""
    for name, text in KINDS["systemd"](load_recipe(DEMO)).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        there = text.replace("/opt/rlmq/.venv/bin/rlmq", "/bin/true").replace("/usr/bin/redis-server", "/bin/true")
        (tmp_path / name).write_text(there)
    shutil.copy(tmp_path / "rlmq@.service", tmp_path / "rlmq@rollout-0.service")
    return tmp_path


@needs_systemd
@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_every_line(units: Path, unit: str) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"./{unit}"], cwd=units, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", UNITS[1:])
def test_units_are_walled_in(units: Path, unit: str) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=40", f"./{unit}"],
        cwd=units,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.parametrize("key", ["redis.url=redis://elsewhere", "control.address=tcp://0.0.0.0:5555"])
def test_compose_refuses_what_it_brings_along_itself(key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=key.partition("=")[0]):
        deploy_command("compose", DEMO, [key, "control.keys=keys"], tmp_path)


def test_with_control_over_tcp_each_unit_gets_the_keys_of_its_role() -> None:
    loaded = load_recipe(DEMO, ["control.address=tcp://0.0.0.0:5555", "control.keys=keys"])
    files = KINDS["systemd"](loaded)
    controller, actor = files["rlmq-controller.service"], files["rlmq@actor-0.service.d/10-actor.conf"]
    assert "LoadCredential=controller.key:" in controller
    assert all(f"LoadCredential={role}.pub:" in controller for role in loaded.recipe.workers())
    assert "LoadCredential=actor.key:" in actor
    assert "controller.key" not in actor
    assert "control.keys=${CREDENTIALS_DIRECTORY}" in files["rlmq@.service"]


class Manager:
    """A service manager for a test: starts ExecStart lines and reads what they tell it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, unit: str, name: str = "") -> socket.socket:
        """Start a unit; what it tells arrives at the socket."""
        [line] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
        link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        link.bind(str(self.folder / f"notify{len(self.processes)}"))
        link.settimeout(90)
        variables = dict(
            word.removeprefix("Environment=").split("=", 1)
            for word in unit.splitlines()
            if word.startswith("Environment=")
        )
        env = {**os.environ, **variables, "NOTIFY_SOCKET": link.getsockname(), "WATCHDOG_USEC": "4000000"}
        words = shlex.split(line.removeprefix("ExecStart=").replace("%i", name))
        self.processes.append(subprocess.Popen(words, env=env, cwd=self.folder))
        return link


@pytest.fixture
def manager() -> Iterator[Manager]:
    folder = Path(tempfile.mkdtemp(prefix="rlmq-unit-"))
    made = Manager(folder)
    yield made
    for process in reversed(made.processes):  # as the units are ordered: Redis is the last to end
        process.terminate()
        process.wait(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


def until(link: socket.socket, word: str) -> None:
    """Read until the word comes."""
    while word not in link.recv(4096).decode():
        pass


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")
@pytest.mark.timeout(300)
def test_exec_start_lines_tell_that_they_are_ready_alive_and_ending(manager: Manager) -> None:
    # given the units of a recipe, with a folder of the test's own for every place
    places = {
        "/opt/rlmq/.venv/bin/rlmq": f"{sys.executable} -P -m rlmq.cli",
        "/opt/rlmq/recipes": str(ROOT / "recipes"),
        "/etc/rlmq": str(manager.folder),
        "/run/rlmq-redis": str(manager.folder),
        "/var/lib/rlmq-redis": str(manager.folder),
        "/var/lib/rlmq": str(manager.folder),
    }
    files = KINDS["systemd"](load_recipe(ROOT / "recipes" / "tiny.yaml"))
    for there, here in places.items():
        files = {name: text.replace(there, here) for name, text in files.items()}
    (manager.folder / "redis.conf").write_text(files["redis.conf"])
    # when Redis, the controller and a worker are started, then each becomes ready, and those of ours are watched
    until(manager.start(files["rlmq-redis.service"]), "READY=1")
    controller = manager.start(files["rlmq-controller.service"])
    until(controller, "READY=1")
    recorder = manager.start(files["rlmq@.service"], "recorder-0")
    until(recorder, "READY=1")
    until(recorder, "WATCHDOG=1")
    until(controller, "WATCHDOG=1")
    # when they are told to end, then they say so
    manager.processes[2].terminate()
    until(recorder, "STOPPING=1")
