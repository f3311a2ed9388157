"""The report of one run, or of several that are compared: one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rlmq.buffer.recording import Recording, place_of
from rlmq.common.errors import UsageError
from rlmq.common.run_folder import RunFolder
from rlmq.consumers.report import metrics_of

Series = dict[int, float]

_CURVES = (
    ("reward_mean", "reward"),
    ("eval", "reward, evaluation"),
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("kl_k3", "KL to the policy before"),
    ("entropy", "entropy"),
    ("response_tokens_mean", "response tokens"),
    ("staleness_mean", "staleness, versions"),
    ("tokens_per_s", "tokens/s"),
)
_COLOURS = {
    "generating": "#4c78a8",
    "scoring": "#f58518",
    "training": "#54a24b",
    "syncing": "#b279a2",
    "checkpointing": "#9d755d",
    "evaluating": "#72b7b2",
}
_SHOWN = 3
_NEWEST_SPANS = 600
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 % for 1, 2, … degrees of freedom."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ddd }}
img {{ max-width: 100% }} table {{ border-collapse: collapse; margin: .5rem 0 }}
td, th {{ padding: .2rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #eee }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums }} pre {{ white-space: pre-wrap; margin: 0 }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_report(groups: Mapping[str, Sequence[RunFolder]]) -> str:
    """The report as HTML.

    Args:
        groups: runs by what they are; those of one group (other seeds) are drawn as their mean with a band of 95 %.

    Raises:
        UsageError: no run has figures.
    """
    runs = [run for members in groups.values() for run in members]
    if not any(metrics_of(run) for run in runs):
        raise UsageError("report", got="no figures", expected="a run that has finished a step")
    parts = [
        ("Runs", _table(["run", "group", "exit", "steps", "reward, last step", "seconds"], _summaries(groups))),
        ("Curves", _picture(lambda plt: _curves(plt, groups))),
        ("Rows", _picture(lambda plt: _rows_drawn(plt, runs))),
    ]
    for run in runs[:_SHOWN]:
        parts.append((f"What each process did: {run.run_id}", _picture(partial(gantt, run=run))))
    parts.append(("Samples", "".join(_samples(run) for run in runs[:_SHOWN])))
    parts.append(("Failures", _failures(runs)))
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{content}" for title, content in parts)
    return _PAGE.format(title=html.escape(", ".join(groups)), body=body)


# -- curves --------------------------------------------------------------------------------------------------------


def series(run: RunFolder, name: str) -> Series:
    """A figure by step; `eval` is the mean reward of evaluations."""
    kind, key = ("eval", "reward_mean") if name == "eval" else ("train", name)
    return {line["step"]: float(line[key]) for line in metrics_of(run, kind) if line.get(key) is not None}


def band(members: Sequence[Series]) -> dict[int, tuple[float, float]]:
    """Mean over runs and half its 95 % interval (Student's t; 0 for one run), at steps that all have."""
    found = {}
    for step in sorted(set.intersection(*(set(one) for one in members)) if members else ()):
        values = [one[step] for one in members]
        mean, freedom = math.fsum(values) / len(values), len(values) - 1
        half = 0.0
        if freedom:
            deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / freedom)
            quantile = _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96
            half = quantile * deviation / math.sqrt(len(values))
        found[step] = (mean, half)
    return found


def _curves(plt: Any, groups: Mapping[str, Sequence[RunFolder]]) -> Any:
    found = {
        name: {group: made for group, runs in groups.items() if (made := band([series(run, name) for run in runs]))}
        for name, _ in _CURVES
    }
    told = {
        name: any(mean for points in own.values() for mean, _ in points.values()) for name, own in found.items()
    }
    shown = [(name, title) for name, title in _CURVES if told[name]]  # not what is 0 throughout
    columns = min(3, len(shown)) or 1
    rows = -(-len(shown) // columns) or 1
    figure, axes = plt.subplots(rows, columns, figsize=(4.3 * columns, 2.7 * rows), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (name, title) in zip(axes.flat, shown, strict=False):
        for index, (group, points) in enumerate(found[name].items()):
            steps, means = list(points), [mean for mean, _ in points.values()]
            low, high = zip(*((mean - half, mean + half) for mean, half in points.values()), strict=True)
            axis.plot(steps, means, color=f"C{index % 10}", label=group, marker="." if len(steps) < 20 else None)
            axis.fill_between(steps, low, high, color=f"C{index % 10}", alpha=0.18, linewidth=0)
        axis.set_title(title, loc="left", fontsize="medium")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
    if len(groups) > 1:
        axes.flat[0].legend(fontsize="small")
    return figure


def _rows_drawn(plt: Any, runs: Sequence[RunFolder]) -> Any:
    """Lengths of rows that were trained on beside the others', and how old the trained ones were: a bias shows."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 2.8))
    for index, run in enumerate(runs[:_SHOWN]):
        rows = [row for row in _rows(run) if row["response_ids"]]
        trained = [row for row in rows if _trained(row)]
        others = [row for row in rows if not _trained(row)]
        for some, said, style in ((trained, "trained on", "-"), (others, "ended otherwise", ":")):
            if some:
                label = f"{run.run_id}: {said} ({len(some)})"
                how = {"histtype": "step", "linestyle": style, "color": f"C{index}", "label": label}
                left.hist([len(row["response_ids"]) for row in some], bins=30, density=True, **how)
        ages = [staleness(row) for row in trained if row.get("policy_versions")]
        if ages:
            right.hist(
                ages, bins=[n - 0.5 for n in range(min(ages), max(ages) + 2)], histtype="step", color=f"C{index}"
            )
    for axis, title in ((left, "response tokens"), (right, "staleness of trained rows, versions")):
        axis.set_title(title, loc="left", fontsize="medium")
    left.legend(fontsize="small")
    return figure


def staleness(row: Mapping[str, Any]) -> int:
    """Versions between the weights of a trained row's oldest token and those that it trained."""
    step, oldest = int(row.get("end_step") or row["step"]), int(min(row["policy_versions"]))
    return step - 1 - oldest


# -- what each process did -----------------------------------------------------------------------------------------


def activities(run: RunFolder) -> dict[str, list[tuple[str, float, float]]]:
    """By process: what it did from when to when, in seconds of the run, as the controller heard it."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    open_: dict[str, tuple[str, float]] = {}
    first = last = 0.0
    for text in run.control_log.read_text().splitlines() if run.control_log.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        event, last = line.get("event", {}), float(line.get("at", last))
        first = first or last
        if event.get("type") not in ("heard", "left"):
            continue
        name = f"{event['role']}-{event['rank']}"
        activity, since = open_.pop(name, ("idle", last))
        if activity != "idle" and last > since:
            found.setdefault(name, []).append((activity, since - first, last - first))
        open_[name] = (event.get("activity") or "idle", last)
    return found


def gantt(plt: Any, *, run: RunFolder) -> Any:
    """Each process a line, each activity a colour, its share of the time beside it; of long runs the end."""
    lines = activities(run)
    figure, axis = plt.subplots(figsize=(12, 0.6 + 0.38 * max(1, len(lines))))
    end = max((stop for spans in lines.values() for _, _, stop in spans), default=1.0)
    begins = sorted(start for spans in lines.values() for _, start, _ in spans)
    begin = begins[-_NEWEST_SPANS:][0] if begins else 0.0
    for place, name in enumerate(sorted(lines, reverse=True)):
        spans = lines[name]
        for activity, start, stop in spans:
            axis.barh(place, stop - start, left=start, height=0.72, color=_COLOURS.get(activity, "#bbb"))
        busy = sum(max(0.0, stop - max(start, begin)) for _, start, stop in spans) / max(1e-9, end - begin)
        axis.text(end + 0.01 * (end - begin), place, f"{busy:.0%}", va="center", fontsize="small")
    axis.set_yticks(range(len(lines)), sorted(lines, reverse=True))
    axis.set_xlim(begin, end)
    axis.set_xlabel("seconds since the run began")
    used = {activity for spans in lines.values() for activity, _, _ in spans}
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS.get(one, "#bbb")) for one in sorted(used)]
    axis.legend(
        handles, sorted(used), ncols=len(used) or 1, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False
    )
    return figure


# -- tables --------------------------------------------------------------------------------------------------------


def _summaries(groups: Mapping[str, Sequence[RunFolder]]) -> Iterable[list[Any]]:
    for group, runs in groups.items():
        for run in runs:
            summary = json.loads(run.summary.read_text()) if run.summary.is_file() else {}
            rewards = series(run, "reward_mean")
            last = rewards[max(rewards)] if rewards else None
            spent = sum(float(line.get("step_s") or 0.0) for line in metrics_of(run, "train"))
            yield [run.run_id, group, summary.get("exit"), len(metrics_of(run, "train")), last, round(spent, 1)]


def _samples(run: RunFolder) -> str:
    """The best, the worst and the middle ones of the last step."""
    rows = _rows(run, last=True)
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])
    middle = len(scored) // 2
    picked = [*scored[:2], *scored[middle : middle + 1], *scored[-2:]]
    unique = {row["sample_id"]: row for row in picked}
    cells = [[r["sample_id"], r["reward"], r["prompt_text"], r["response_text"]] for r in unique.values()]
    return f"<h3>{html.escape(run.run_id)}</h3>" + _table(["sample", "reward", "prompt", "response"], cells)


def _failures(runs: Sequence[RunFolder]) -> str:
    """How rows ended otherwise than trained, and what processes died of."""
    cells: list[list[Any]] = []
    for run in runs:
        ends: dict[str, int] = {}
        for row in _rows(run):
            if not _trained(row):
                end = f"{row.get('end_state')}({str(row.get('end_reason') or '')[:200]})"
                ends[end] = ends.get(end, 0) + 1
        cells += [[run.run_id, f"rows {end}", count] for end, count in sorted(ends.items())]
        for text in run.supervisor_log.read_text().splitlines() if run.supervisor_log.is_file() else ():
            death = json.loads(text)
            if death.get("what") not in ("started", None) and death.get("exit_code"):
                cells.append([run.run_id, f"{death['name']} {death['what']}", death["exit_code"]])
    return _table(["run", "what", "number"], cells) if cells else "<p>None.</p>"


def _rows(run: RunFolder, *, last: bool = False) -> list[dict[str, Any]]:
    recording = Recording(place_of(run))
    segments = recording.segments("train")
    if not segments:
        return []
    rows: list[dict[str, Any]] = recording.read(steps=[segments[-1].last_step] if last else None).to_pylist()
    return rows


def _trained(row: Mapping[str, Any]) -> bool:
    return row.get("end_state") == "trained" if "end_state" in row else row.get("advantages") is not None


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f'<td class="n">{value:.5g}</td>' if isinstance(value, float) else f'<td class="n">{value}</td>'
        return f"<td><pre>{html.escape('-' if value is None else str(value))}</pre></td>"

    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    return f"<table><tr>{head}</tr>{''.join('<tr>' + ''.join(map(cell, row)) + '</tr>' for row in rows)}</table>"


def _picture(draw: Callable[[Any], Any]) -> str:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"figure.constrained_layout.use": True, "font.size": 9, "text.parse_math": False}):
        figure = draw(plt)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        plt.close(figure)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
