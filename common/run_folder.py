"""Where everything of one run lies; the one place that spells its file names."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`runs/<run_id>/` and what is in it."""

    path: Path

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def recipe(self) -> Path:
        """The resolved recipe (YAML)."""
        return self.path / "recipe.yaml"

    @property
    def logs(self) -> Path:
        """One log per process: `logs/<role>-<rank>.log`."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object per step and evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def progress(self) -> Path:
        """What the run does now: one JSON object that the controller rewrites, for the live display."""
        return self.path / "progress.json"

    @property
    def control(self) -> Path:
        """The control plane now, for `rlmq status` and `why` (`rlmq.common.control.Snapshot`)."""
        return self.path / "control.json"

    @property
    def control_log(self) -> Path:
        """What the controller heard and did, one JSON object per line."""
        return self.path / "control_log.jsonl"

    @property
    def supervisor_log(self) -> Path:
        """Starts and ends of the run's processes on this machine (`rlmq.common.control.Death`)."""
        return self.path / "supervisor.jsonl"

    @property
    def metrics_addresses(self) -> Path:
        """`metrics/<role>-<rank>.json`: where each process serves `/metrics` (file-based discovery)."""
        return self.path / "metrics"

    @property
    def environment(self) -> Path:
        """`environment/<role>.json`: versions and threads that a role computes with, in deterministic mode."""
        return self.path / "environment"

    @property
    def samples(self) -> Path:
        """Parquet files of ended samples: `samples/<table>-<step>.parquet`."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """`checkpoints/step-000012/` in the Hugging Face layout."""
        return self.path / "checkpoints"

    def checkpoints_of(self, role: str) -> Path:
        """`critic_checkpoints/`: those of a role that learns beside the actor.

        A critic has its heads in the place of the model's own; a reward model is a sequence classifier with one
        label.
        """
        return self.path / f"{role}_checkpoints"

    @property
    def nodes(self) -> Path:
        """Items of nodes that joined the run after it began."""
        return self.path / "nodes"

    @property
    def fingerprints(self) -> Path:
        """What each step made of the gradients and the weights, in short (`rlmq.consumers.fingerprints`)."""
        return self.path / "fingerprints.jsonl"

    @property
    def source(self) -> Path:
        """`{"folder": …, "code": …}`: the recipe's folder, and the hash of the user's files that it names."""
        return self.path / "source.json"

    @property
    def batch_log(self) -> Path:
        """The batch log."""
        return self.path / "batch_log.jsonl"

    @property
    def server(self) -> Path:
        """Data of the Redis server that rlmq starts for the run."""
        return self.path / "redis"

    @property
    def summary(self) -> Path:
        """Written at the end."""
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        """The reward curve."""
        return self.path / "reward.png"

    @property
    def addresses(self) -> Path:
        """`addresses.json`: the Redis URL of the run, for processes started by hand."""
        return self.path / "addresses.json"

    @property
    def sockets(self) -> Path:
        """A short private folder for unix sockets (the kernel allows 107 bytes for a socket's path).

        Its name is a hash of the run folder's real path, so that two runs never share one. `RLMQ_SOCKETS` names
        another place for it, where processes of one run do not share /tmp.
        """
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]
        runtime = Path(f"/run/user/{os.getuid()}")
        usual = runtime if os.access(runtime, os.W_OK) else Path("/tmp")
        base = Path(os.environ.get("RLMQ_SOCKETS") or usual)
        return base / f"rlmq-{os.getuid()}-{digest}"

    @property
    def doorbell_address(self) -> str:
        """ZeroMQ endpoint of the controller's XPUB."""
        return f"ipc://{self.sockets}/doorbell"

    @property
    def reports_address(self) -> str:
        """ZeroMQ endpoint of the controller's ROUTER."""
        return f"ipc://{self.sockets}/reports"
