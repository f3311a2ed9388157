"""Case D10: two runs on one machine, at once."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)


def outcome(cli: Any, name: str) -> str:
    run: Path = cli.newest_run(name)
    return hashlib.sha256((run / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()).hexdigest()


def test_two_names_at_once_do_not_meet(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a foreign listener on torch's usual port, which the environment names
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 29500))
        listener.listen()
        # when two runs start together
        common = ("train.steps=2", "placement.actor.workers=2")
        pair = {name: cli.start("up", cli.tiny, *common, f"run.name={name}") for name in ("p", "q")}
        for name, process in pair.items():
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, name + out[-2000:] + err[-2000:]
    # then each has the weights that it has when it runs alone
    alone = cli.run("up", cli.tiny, *common, "run.name=alone")
    assert alone.code == 0, alone.text
    assert outcome(cli, "p") == outcome(cli, "q") == outcome(cli, "alone")


def test_one_name_twice_at_once_runs_once(cli: Any) -> None:
    pair = [cli.start("up", cli.tiny, "train.steps=2", "run.name=same") for _ in range(2)]
    texts = [process.communicate(timeout=200) for process in pair]
    codes = sorted(process.returncode for process in pair)
    assert codes == [0, 4], texts
    [refused] = [err for process, (_, err) in zip(pair, texts, strict=True) if process.returncode == 4]
    assert "Traceback" not in refused
    assert len(refused.strip().splitlines()) == 1
    assert json.loads((cli.newest_run("same") / "summary.json").read_text())["steps"] == 2
