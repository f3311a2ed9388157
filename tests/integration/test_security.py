"""A whole run over TCP with keys, among hostile peers: it ends as if they were not there, no code of theirs ran.

Every process of the run has an audit hook that tells when a class is looked up for a pickle.
"""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - what is thrown at the run
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import zmq
from integration.test_nodes import NODE, recipe

from rlmq.common.bus import connect
from rlmq.common.curve import Keys
from rlmq.common.endpoints import Endpoints
from rlmq.common.messages import Goodbye, encode
from rlmq.common.recipe.schema import ControlBlock
from rlmq.common.run_folder import RunFolder

AUDIT = """
import os, sys
_folder = os.environ["AUDIT_FOLDER"]

def _mine(ending):
    return os.path.join(_folder, str(os.getpid()) + ending)

def _arm():
    with open("/proc/self/cmdline", "rb") as line, open(_mine(".armed"), "wb") as armed:
        armed.write(line.read().replace(bytes(1), b" "))

def _hook(event, arguments):
    if event == "rlmq.forked":
        _arm()
    elif event == "pickle.find_class":
        with open(_mine(".fired"), "a") as fired:
            fired.write(f"{arguments}\\n")

_arm()
sys.addaudithook(_hook)
"""
ROLES = ("prompts", "rollout", "reward", "reference", "actor", "recorder")


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def raw(port: int, data: bytes) -> None:
    """Throw bytes at a port, and look whether the peer hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.settimeout(10)
        try:
            peer.sendall(data)
            while peer.recv(4096):
                pass
        except OSError:
            pass


class Hostile:
    """Somebody who reaches the control ports of a run."""

    def __init__(self, run: RunFolder, control: ControlBlock, folder: Path) -> None:
        self.run, self.control, self.folder = run, control, folder
        self.ports = (control.place[1], control.place[1] + 1)
        self.canary = folder / "canary"
        self.pickle = pickle.dumps(Bomb(self.canary))

    def throw_bytes(self) -> None:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        for port in self.ports:
            raw(port, self.pickle * 20)
            raw(port, os.urandom(300))
            raw(port, greeting + b"\x06" + struct.pack(">Q", 2 << 30) + b"A" * 1000)  # a frame of 2 GB

    def knock(self, control: ControlBlock, name: str, data: bytes) -> None:
        """Send from a socket that speaks ZeroMQ; wait until it went out or was refused."""
        endpoints = Endpoints.of(self.run, control)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 2000)
            connect(dealer, endpoints, endpoints.reports, name)
            dealer.send(data)

    def without_a_key(self) -> None:
        self.knock(ControlBlock(address=self.control.address), "reward", self.pickle)

    def with_another_key(self) -> None:
        theirs = Keys(self.folder / "theirs")
        for name in ("controller", "reward"):
            theirs.make(name)
        assert self.control.keys is not None
        ours = Keys(Path(self.control.keys))
        theirs.public_file("controller").write_bytes(ours.public("controller"))
        self.knock(ControlBlock(address=self.control.address, keys=str(theirs.folder)), "reward", self.pickle)

    def with_an_operators_key(self) -> None:
        """Bytes that are no message, and words of a role that the key does not speak for."""
        self.knock(self.control, "operator", self.pickle)
        end = Goodbye(role="actor", rank=0, incarnation=99, exit_code=6, error="hostile")
        self.knock(self.control, "operator", encode(end))


def refused(run: RunFolder) -> dict[str, float]:
    """What the controller counts, by reason."""
    [entry] = json.loads((run.metrics_addresses / "controller-0.json").read_text())
    with urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(r'rlmq_control_refused_total\{reason="(\w+)"\} (\S+)', text)}


@pytest.fixture(scope="module")
def attacked(module_cli: Any) -> tuple[RunFolder, Hostile, dict[str, float], Path]:
    """A finished run that was attacked from its beginning on."""
    folder: Path = module_cli.folder
    audit, site = folder / "audit", folder / "site"
    audit.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(AUDIT)
    own = recipe(module_cli, folder, NODE)
    made = module_cli.run("keys", folder / "keys", "--recipe", own)
    assert made.code == 0, made.text
    control = ControlBlock(address=f"tcp://127.0.0.1:{free_port()}", keys=str(folder / "keys"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        patch.setenv("AUDIT_FOLDER", str(audit))
        up = module_cli.start(
            "up",
            own,
            "train.steps=6",
            "algorithm.kl_coef=0.01",
            f"control.address={control.address}",
            f"control.keys={control.keys}",
        )
    run = RunFolder(folder / "runs" / "tiny-1")
    module_cli.wait_until((run.metrics_addresses / "controller-0.json").is_file, "a controller", 90.0)
    hostile = Hostile(run, control, folder)
    module_cli.wait_until(lambda: _listens(hostile.ports), "control sockets", 60.0)
    hostile.throw_bytes()
    hostile.without_a_key()
    hostile.with_another_key()
    hostile.with_an_operators_key()
    counted: dict[str, float] = {}

    def all_counted() -> bool:
        counted.update(refused(run))
        return set(counted) >= {"handshake", "key", "undecodable", "role"} and bool(
            {"plain", "unfinished"} & set(counted)
        )

    module_cli.wait_until(all_counted, "every refusal counted", 60.0)
    out, err = up.communicate(timeout=200)
    assert up.returncode == 0, out[-3000:] + err[-3000:]
    return run, hostile, counted, audit


def _listens(ports: tuple[int, ...]) -> bool:
    try:
        for port in ports:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.timeout(400)
def test_hostile_peers_are_counted_and_named_and_nothing_happens(
    attacked: tuple[RunFolder, Hostile, dict[str, float], Path],
) -> None:
    run, hostile, counted, _ = attacked
    assert json.loads(run.summary.read_text())["steps"] == 6
    assert counted["handshake"] >= 2
    assert not hostile.canary.exists()
    log = (run.logs / "controller-0.log").read_text()
    stranger = Keys(hostile.folder / "theirs").public("reward").decode()
    [line] = [line for line in log.splitlines() if "reason=key" in line]
    assert "address=127.0.0.1" in line
    assert stranger in line
    assert re.search(r"address=127\.0\.0\.1 key_of=operator reason=role", log)
    assert re.search(r"address=127\.0\.0\.1 key_of=operator reason=undecodable", log)


@pytest.mark.timeout(400)
def test_no_process_looks_up_a_class_for_a_pickle(
    attacked: tuple[RunFolder, Hostile, dict[str, float], Path],
) -> None:
    *_, audit = attacked
    armed = [path.read_text() for path in audit.glob("*.armed")]
    assert any(" controller " in line for line in armed)
    assert any("reward_child" in line for line in armed)
    assert not [role for role in (*ROLES, "safety") if not any(f" worker {role} " in line for line in armed)]
    assert not {path.name: path.read_text() for path in audit.glob("*.fired")}


@pytest.mark.timeout(60)
def test_the_audit_hook_tells_of_a_planted_pickle(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    data = pickle.dumps(Bomb(tmp_path / "canary"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "AUDIT_FOLDER": str(tmp_path)}
    code = f"import pickle; pickle.loads({data!r})"
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, timeout=50, check=True)
    assert (tmp_path / "canary").exists()
    [fired] = tmp_path.glob("*.fired")
    assert "pathlib" in fired.read_text()


@pytest.mark.timeout(200)
def test_an_address_that_others_reach_is_refused_before_anything_starts(cli: Any) -> None:
    began = time.monotonic()
    done = cli.run("up", cli.tiny, "control.address=tcp://0.0.0.0:5555")
    assert done.code == 2
    assert "rlmq keys" in done.text
    assert time.monotonic() - began < 60
    assert not (cli.folder / "runs").exists()
