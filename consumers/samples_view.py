"""`rlmq samples`: the best, the worst and some random samples of a step, read from the run's Parquet files."""

from __future__ import annotations

import json
import math
import random as random_numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rlmq.buffer.recording import Recording, place_of
from rlmq.common.errors import UsageError
from rlmq.common.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.text import Text

Tokens = Sequence[tuple[str, float]]
"""The tokens of a response as texts, and the logarithm of what their probability is now over what it was."""
_SEEN = 12  # of 255: weaker colours are left out


def show_samples(
    run: RunFolder,
    *,
    table: str = "train",
    step: int | None = None,
    best: int = 1,
    worst: int = 1,
    random: int = 1,
    seed: int = 0,
    as_json: bool = False,
    keep: Callable[[pa.Table], pa.Table] | None = None,
    ratios: Callable[[Sequence[dict[str, Any]]], Sequence[Tokens]] | None = None,
) -> None:
    """Print samples of one step.

    Args:
        run: the run.
        table: `train` or `eval`.
        step: which step; none: the newest that has samples.
        best, worst, random: how many of each; a sample is shown once.
        seed: of the random choice: the same samples each time.
        as_json: one JSON object per sample and line instead of text.
        keep: takes some of the step's rows.
        ratios: the tokens of rows with their log-prob ratios, by which they are coloured.

    Raises:
        UsageError: there are no such samples; the message says which there are.
    """
    recording = Recording(place_of(run))
    segments = recording.segments(table)
    if not segments:
        raise UsageError(
            f"samples of run {run.run_id}",
            got=f"no {table} samples in {recording.place}",
            expected="at least one finished step",
            remedy="Wait for the first step, or look at another run or --table",
        )
    chosen = max(one.last_step for one in segments) if step is None else step
    found = recording.read(table, steps=[chosen])
    rows = (keep(found) if keep is not None else found).to_pylist()
    picked = _pick(rows, best, worst, random, seed)
    answered = [row for _, row in picked if row["response_ids"]] if ratios is not None else []
    made = zip(answered, ratios(answered), strict=True) if ratios is not None else ()
    tokens = {row["sample_id"]: one for row, one in made}
    if as_json:
        for title, row in picked:
            own = {"tokens": tokens.get(row["sample_id"])} if ratios is not None else {}
            sys.stdout.write(json.dumps({"pick": title, **_figures(row), **_texts(row), **own}) + "\n")
    else:
        _print(run, table, chosen, rows, picked, tokens)


def _pick(
    rows: Sequence[dict[str, Any]], best: int, worst: int, random: int, seed: int
) -> list[tuple[str, dict[str, Any]]]:
    """Best first, then worst, then random ones of the rest; ties by sample id."""
    scored = sorted((r for r in rows if r["reward"] is not None), key=lambda r: (-r["reward"], r["sample_id"]))
    taken: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in scored[:best]:
        taken[row["sample_id"]] = ("best", row)
    for row in reversed(scored):
        if worst > 0 and row["sample_id"] not in taken:
            taken[row["sample_id"]] = ("worst", row)
            worst -= 1
    rest = [row for row in rows if row["sample_id"] not in taken]
    chosen = random_numbers.Random(seed).sample(rest, min(random, len(rest)))
    return [*taken.values(), *(("random", row) for row in chosen)]


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    versions = row.get("policy_versions") or []
    return {
        "sample_id": row["sample_id"],
        "source": row["source"],
        "step": row["step"],
        "reward": row["reward"],
        "reward_parts": {name.removeprefix("reward."): v for name, v in row.items() if name.startswith("reward.")},
        "advantage": _first(row.get("advantages")),
        "policy_versions": sorted(set(versions)),
        "prompt_tokens": len(row["prompt_ids"]),
        "response_tokens": None if row["response_ids"] is None else len(row["response_ids"]),
        "truncated": row["truncated"],
        "trained": row.get("advantages") is not None,
    }


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["prompt_text"], "response": row["response_text"]}


def _first(values: Sequence[float] | None) -> float | None:
    return values[0] if values else None


def _print(
    run: RunFolder,
    table: str,
    step: int,
    rows: Sequence[dict[str, Any]],
    picked: Sequence[tuple[str, dict[str, Any]]],
    tokens: Mapping[str, Tokens],
) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.rule import Rule
    from rich.text import Text

    console = Console(file=sys.stdout)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no verdict for any"
    console.print(Text(f"{run.run_id}, {table}, step {step}: {len(rows)} samples, {mean}", style="bold"))
    styles = {"best": "green", "worst": "red", "random": "blue"}
    for title, row in picked:
        response = row["response_text"]
        body = Group(
            Text(_visible(row["prompt_text"] or ""), style="dim"),
            Rule(style="dim"),
            # Text, not markup: a response may contain square brackets, or control characters.
            Text("(no response)", style="dim") if response is None else _response(row, tokens),
            Rule(style="dim"),
            Text(_summary(_figures(row)), style="italic"),
        )
        console.print(
            Panel(body, title=Text(f"{title}  {row['sample_id']}"), title_align="left", border_style=styles[title])
        )


def _response(row: dict[str, Any], tokens: Mapping[str, Tokens]) -> Text:
    """The response; with ratios, what has become likelier green and what has become less likely red."""
    from rich.text import Text

    known = tokens.get(row["sample_id"])
    if known is None:
        return Text(_visible(row["response_text"]))
    text = Text()
    for token, log_ratio in known:
        strength = round(255 * (1.0 - math.exp(-abs(log_ratio))))
        colour = f"on rgb(0,{strength},0)" if log_ratio > 0 else f"on rgb({strength},0,0)"
        text.append(_visible(token), style=colour if strength > _SEEN else "")
    return text


def _summary(figures: dict[str, Any]) -> str:
    reward = "no verdict" if figures["reward"] is None else f"reward {figures['reward']:g}"
    parts = ", ".join(f"{name} {_number(value)}" for name, value in figures["reward_parts"].items())
    versions = figures["policy_versions"]
    version = "none" if not versions else f"{versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else "")
    words = [
        f"{reward} ({parts})" if parts else reward,
        f"advantage {_number(figures['advantage'])}",
        f"policy version {version}",
        f"{figures['prompt_tokens']} + {_number(figures['response_tokens'])} tokens",
    ]
    if figures["truncated"]:
        words.append("truncated")
    return " · ".join(words)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _visible(text: str) -> str:
    """Control characters as their symbols: a response must not be able to steer the terminal."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "�" for c in text)
