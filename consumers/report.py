"""The reward curve of a run as a picture."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from rlmq.common.run_folder import RunFolder

_SMOOTH_FROM = 20  # with fewer steps than this a running mean hides more than it shows
_WINDOW_SHARE = 0.1


def draw_reward_curve(run: RunFolder) -> bool:
    """Draw `reward.png` from `metrics.jsonl`: reward over training steps, with the evaluations.

    Returns:
        False when there are no figures yet; nothing is written then.
    """
    train, evaluations = ({line["step"]: line for line in metrics_of(run, kind)} for kind in ("train", "eval"))
    if not train and not evaluations:
        return False
    # matplotlib only here: the recorder stays small as long as no report is asked for.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    _draw_training(axes, train)
    _draw_evaluations(axes, evaluations)
    axes.set_title(f"{run.run_id}: reward by training step", loc="left", wrap=True, parse_math=False)
    axes.set_xlabel("training step")
    axes.set_ylabel("reward (mean over samples)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none", fontsize="small")
    temporary = run.curve.with_name(f".{run.curve.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    plt.close(figure)
    temporary.replace(run.curve)
    return True


def _draw_training(axes: Any, train: dict[int, dict[str, Any]]) -> None:
    steps = [step for step, line in train.items() if line.get("reward_mean") is not None]
    if not steps:
        return
    means = [float(train[step]["reward_mean"]) for step in steps]
    spreads = [float(train[step].get("reward_std") or 0.0) for step in steps]
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    axes.fill_between(steps, low, high, color="C0", alpha=0.12, linewidth=0, label="± 1 standard deviation")
    if len(steps) < _SMOOTH_FROM:
        axes.plot(steps, means, color="C0", linewidth=1.6, marker=".", label="training batch")
        return
    window = max(2, round(len(steps) * _WINDOW_SHARE))
    axes.plot(steps, means, color="C0", linewidth=0.8, alpha=0.5, label="training batch")
    axes.plot(
        steps, _running_mean(means, window), color="C0", linewidth=2.0, label=f"running mean of {window} steps"
    )


def _draw_evaluations(axes: Any, evaluations: dict[int, dict[str, Any]]) -> None:
    names = sorted({name for line in evaluations.values() for name in line.get("sets", {})})
    for index, name in enumerate(names):
        points = [
            (step, float(line["sets"][name]["reward_mean"]))
            for step, line in evaluations.items()
            if line.get("sets", {}).get(name, {}).get("reward_mean") is not None
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(
                x,
                y,
                color=f"C{index + 1}",
                marker="Dos^v"[index % 5],
                markersize=6,
                linestyle="--",
                linewidth=1.2,
                label=f"evaluation: {name}",
                zorder=3,
                clip_on=False,
            )


def _running_mean(values: list[float], window: int) -> list[float]:
    """Mean over the last `window` values, fewer at the beginning."""
    return [
        sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - window) : end])
    ]


def metrics_of(run: RunFolder, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` by step, those of one kind or all; of a step that was redone, the last."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for text in run.metrics.read_text(errors="replace").splitlines() if run.metrics.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            found[line.get("kind", ""), int(line.get("step", 0))] = line
    return [line for (own, _), line in sorted(found.items(), key=lambda item: item[0][1]) if kind in (None, own)]
