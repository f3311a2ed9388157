"""Every Prometheus metric that rlmq serves, declared once.

Names have the prefix `rlmq_` and base units (seconds, bytes, tokens); ratios lie between 0 and 1; no label
holds an id. `role`, `rank` and `run` are labels of the scrape target, not of each series: every process writes
`runs/<run_id>/metrics/<role>-<rank>.json` in the form of Prometheus's file-based discovery.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from rlmq.common.run_folder import RunFolder

# `_created` series double the page and say nothing that the scrape times do not.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

ACTIVITY_SECONDS = Counter(
    "rlmq_activity_seconds_total", "Seconds that this worker spent, by activity.", ["activity"], registry=REGISTRY
)
ROWS_WRITTEN = Counter(
    "rlmq_rows_written_total", "Rows to which this worker wrote columns.", ["table", "stage"], registry=REGISTRY
)
ROWS_ACKED = Counter(
    "rlmq_rows_acked_total", "Rows that this worker was done with.", ["table", "stage"], registry=REGISTRY
)
ROWS_WITHOUT_VERDICT = Counter(
    "rlmq_rows_without_verdict_total", "Rows that no reward function gave a value.", ["table"], registry=REGISTRY
)
CALLS_HANDLED = Counter(
    "rlmq_calls_handled_total",
    "Calls of the controller that this worker completed.",
    ["method"],
    registry=REGISTRY,
)
STALE_COMMANDS = Counter(
    "rlmq_stale_commands_total", "Commands older than one that this worker had seen; ignored.", registry=REGISTRY
)
GENERATED_TOKENS = Counter(
    "rlmq_generated_tokens_total", "Response tokens sampled by this worker.", ["table"], registry=REGISTRY
)
REWARD_CALL_SECONDS = Histogram(
    "rlmq_reward_call_seconds",
    "Wall-clock seconds of one call of a reward function.",
    ["function"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
REWARD_CALL_FAILURES = Counter(
    "rlmq_reward_call_failures_total",
    "Calls of a reward function that gave no verdict.",
    ["function"],
    registry=REGISTRY,
)
WEIGHT_SYNC_SECONDS = Histogram(
    "rlmq_weight_sync_seconds",
    "Seconds of one weight transfer, from its beginning to the commit.",
    ["direction"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
WEIGHT_SYNC_BYTES = Counter(
    "rlmq_weight_sync_bytes_total", "Bytes of weights sent or received.", ["direction"], registry=REGISTRY
)
CHECKPOINT_SECONDS = Histogram(
    "rlmq_checkpoint_seconds",
    "Seconds from the beginning of a checkpoint to its rename; training goes on meanwhile.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
CHECKPOINT_BLOCKED_SECONDS = Counter(
    "rlmq_checkpoint_blocked_seconds_total",
    "Seconds that the trainer waited for checkpoints and the batch log.",
    registry=REGISTRY,
)
CHECKPOINT_FAILURES = Counter(
    "rlmq_checkpoint_failures_total", "Checkpoints that could not be written.", registry=REGISTRY
)
BUFFER_ROWS = Gauge(
    "rlmq_buffer_rows",
    "Rows by table, stage and state (ready, leased, acked), as the store counts them.",
    ["table", "stage", "state"],
    registry=REGISTRY,
)
BUFFER_LIVE_ROWS = Gauge(
    "rlmq_buffer_live_rows", "Rows that have not reached an end state.", ["table"], registry=REGISTRY
)
BUFFER_PAYLOAD_BYTES = Gauge(
    "rlmq_buffer_payload_bytes", "Bytes of row payload that the store holds.", ["table"], registry=REGISTRY
)
CONTROL_REFUSED = Counter(
    "rlmq_control_refused_total",
    "Peers and messages that the control sockets refused (key, plain, handshake, unfinished, role, undecodable).",
    ["reason"],
    registry=REGISTRY,
)
CONTROL_DISCONNECTED = Counter(
    "rlmq_control_disconnected_total", "Connections to the control sockets that ended.", registry=REGISTRY
)
DOORBELLS_DROPPED = Counter(
    "rlmq_doorbells_dropped_total", "Doorbells that a subscriber which does not read has missed.", registry=REGISTRY
)
STEP = Gauge("rlmq_step", "Newest finished training step.", registry=REGISTRY)
POLICY_VERSION = Gauge("rlmq_policy_version", "Policy version that this worker holds.", registry=REGISTRY)

# Name in metrics.jsonl: name of the gauge, and what it is.
_STEP_FIGURES: Mapping[str, tuple[str, str]] = {
    "logprob_mismatch": (
        "logprob_mismatch_mean",
        "Mean absolute difference of rollout's and trainer's log-probs before the step's first update.",
    ),
    "logprob_mismatch_max": ("logprob_mismatch_max", "Greatest such difference of the step."),
    "logprob_mismatch_kl": ("logprob_mismatch_kl", "KL divergence (k3) from rollout to trainer."),
    "reward_mean": ("reward_mean", "Mean reward of the step's samples."),
    "reward_std": ("reward_std", "Standard deviation of the step's rewards."),
    "loss": ("loss", "Loss of the step."),
    "kl_k3": ("rollout_kl", "Estimated KL divergence from rollout to trainer, in nats per token."),
    "ref_kl": ("reference_kl", "Estimated KL divergence to the reference, in nats per token."),
    "entropy": ("entropy", "Mean entropy of the policy, in nats per token."),
    "clip_low": ("clip_low_ratio", "Share of tokens whose ratio was clipped from below, 0 to 1."),
    "clip_high": ("clip_high_ratio", "Share of tokens whose ratio was clipped from above, 0 to 1."),
    "ratio": ("ratio_mean", "Mean probability ratio of new to old policy."),
    "truncated_ratio": ("truncated_ratio", "Share of responses that the length limit cut, 0 to 1."),
    "grad_norm": ("grad_norm", "Gradient norm before clipping."),
    "lr": ("lr", "Learning rate that the step used."),
    "response_tokens_mean": ("response_tokens_mean", "Mean response length in tokens."),
    "staleness_mean": ("staleness_mean", "Mean trainer version minus the oldest version in a sample."),
    "value_loss": ("value_loss", "Loss of the critic."),
    "value_mean": ("value_mean", "Mean value that the critic gave the step's tokens."),
    "explained_variance": ("explained_variance", "Share of the returns' variance that the values explain."),
    "multiplier": ("cost_multiplier", "Weight of the cost (Safe-RLHF)."),
    "cost_mean": ("cost_mean", "Mean cost of the step's samples."),
    "seconds": ("seconds", "Wall-clock seconds of the step."),
}
STEP_FIGURES: Mapping[str, Gauge] = {
    name: Gauge(f"rlmq_train_{suffix}", text, registry=REGISTRY) for name, (suffix, text) in _STEP_FIGURES.items()
}


def set_step_figures(figures: Mapping[str, object]) -> None:
    """Show a step's figures; names that are not declared in this file are left to the trackers."""
    for name, gauge in STEP_FIGURES.items():
        value = figures.get(name)
        if isinstance(value, int | float):
            gauge.set(float(value))


def serve_metrics(role: str, rank: int, run: RunFolder | None = None) -> int:
    """Serve this process's metrics on `http://127.0.0.1:PORT/metrics` from a daemon thread.

    Args:
        role: role of this process.
        rank: its rank.
        run: where its address is written for discovery; none: nowhere.

    Returns:
        The port, chosen by the kernel.
    """
    server, _ = start_http_server(0, addr="127.0.0.1", registry=REGISTRY)
    port = int(server.server_port)
    if run is not None:
        run.metrics_addresses.mkdir(parents=True, exist_ok=True)
        target = run.metrics_addresses / f"{role}-{rank}.json"
        labels = {"run": run.run_id, "role": role, "rank": str(rank)}
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        temporary.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": labels}]))
        temporary.replace(target)
    return port
