"""The metrics page: served, found, well named, and accepted by Prometheus's own linter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlmq.common import metrics
from rlmq.common.run_folder import RunFolder


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def touch_all() -> None:
    """Give every metric a series, so that the page shows it."""
    for metric in vars(metrics).values():
        labels = getattr(metric, "_labelnames", None)
        if labels:
            metric.labels(*["x"] * len(labels))
    metrics.set_step_figures({"reward_mean": 0.25, "unknown": 1.0, "kl": None})


def test_a_live_page_passes_promtool() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    touch_all()
    port = metrics.serve_metrics("reward", 0)

    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page(port), capture_output=True, text=True, timeout=60, check=False
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_names_have_prefix_and_units_and_labels_hold_no_ids() -> None:
    touch_all()

    families = list(text_string_to_metric_families(page(metrics.serve_metrics("reward", 0))))

    own = [f for f in families if not f.name.startswith("process_")]
    assert len(own) > 20
    for family in own:
        assert family.name.startswith("rlmq_")
        assert family.documentation.endswith(".")
        names = {sample.name for sample in family.samples}
        assert any(name.endswith("_total") for name in names) == (family.type == "counter")
        assert not any(re.search(r"_(ms|minutes|kib|mb|percent)\b", name) for name in names)
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {
            *("activity", "table", "stage", "state", "method", "outcome", "function", "direction", "reason", "le"),
        }


def test_step_figures_show_declared_numbers_only() -> None:
    metrics.set_step_figures({"reward_mean": 0.75, "grad_norm": 2, "entropy": None, "no_such": 3.0})

    text = page(metrics.serve_metrics("controller", 0))

    assert "rlmq_train_reward_mean 0.75" in text
    assert "rlmq_train_grad_norm 2.0" in text
    assert "no_such" not in text


def test_the_address_is_left_for_file_based_discovery(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "demo-1")

    port = metrics.serve_metrics("reward", 2, run)

    (entry,) = json.loads((run.metrics_addresses / "reward-2.json").read_text())
    assert entry == {
        "targets": [f"127.0.0.1:{port}"],
        "labels": {"run": "demo-1", "role": "reward", "rank": "2"},
    }
    assert [p.name for p in run.metrics_addresses.iterdir()] == ["reward-2.json"]


def test_two_processes_on_one_machine_get_different_ports() -> None:
    assert metrics.serve_metrics("reward", 0) != metrics.serve_metrics("reward", 1)
