"""`rlmq up` adds supervision only: the same processes, started one by one by hand, make the same run."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROLES = ("prompts", "rollout", "reward", "actor", "recorder")


@pytest.mark.timeout(200)
def test_processes_started_by_hand_make_a_run(cli: Any, redis_url: str) -> None:
    # given a Redis of one's own and a recipe that names it
    args = (cli.tiny, "train.steps=2", "run.name=hand", f"redis.url={redis_url}")
    # when every process is started by itself, workers first
    processes = {role: cli.start("worker", role, "--index", "0", *args) for role in ROLES}
    processes["controller"] = cli.start("controller", *args)
    # then the run ends well, and every process ends by itself
    for name, process in processes.items():
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, name + out[-2000:] + err[-3000:]
    assert cli.summary("hand")["steps"] == 2


@pytest.mark.timeout(200)
def test_every_process_serves_metrics_that_promtool_accepts(cli: Any) -> None:
    process = cli.start("up", cli.tiny, "run.name=watched", "train.steps=500", "evaluate.every_steps=0")

    def addresses() -> dict[str, str]:
        found = {}
        for path in (cli.folder / "runs").glob("watched-*/metrics/*.json"):
            [target] = json.loads(path.read_text())
            found[path.stem] = target["targets"][0]
        return found

    names = {"controller-0", *(f"{role}-0" for role in ROLES)}
    cli.wait_until(lambda: set(addresses()) == names, "every process tells its address")

    def trained() -> bool:
        return any("rlmq_step 3" in page(a) for n, a in addresses().items() if n == "controller-0")

    cli.wait_until(trained, "the controller's page shows step 3")
    for name, address in addresses().items():
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=page(address), capture_output=True, text=True
        )
        assert checked.returncode == 0, name + checked.stdout + checked.stderr
        assert not checked.stderr.strip(), name + checked.stderr
    process.terminate()
    process.communicate(timeout=20)


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def test_dry_run_starts_nothing(cli: Any, tmp_path: Path) -> None:
    done = cli.run("up", cli.tiny, "--dry-run", "train.lr=1e-6")
    assert done.code == 0, done.text
    for role in ("controller", *ROLES):
        assert role in done.out
    assert "1e-06" in done.out or "1.0e-06" in done.out
    assert not (tmp_path / "runs").exists()
    assert not cli.processes()
