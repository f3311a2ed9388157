"""`rlmq why`: the wait graph of a run in one screen, and one sentence that names who everything waits for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from rlmq.cli_buffer import new_console, new_grid, plain, print_json
from rlmq.common.errors import ExitCode
from rlmq.controller.culprit import Answer, explain
from rlmq.controller.evidence import Evidence
from rlmq.controller.wait_graph import Edge, age
from rlmq.run_view import look_at

_EDGES_SHOWN = 14
_COLOURS = {"moves": "green", "ended": "bold", "paused": "yellow"}


def why_command(run: str | None, *, folder: Path, as_json: bool) -> int:
    """`rlmq why`: exit 0 whenever it could tell, whatever it tells."""
    evidence = look_at(folder, run).evidence
    answer = explain(evidence)
    if as_json:
        print_json(answer_json(evidence, answer))
    else:
        _print_answer(evidence, answer)
    return int(ExitCode.OK)


def answer_json(evidence: Evidence, answer: Answer) -> dict[str, Any]:
    """For programs: the verdict, the culprit with its process, and the graph."""
    state = evidence.processes.get(answer.culprit)
    told = asdict(answer)
    edges = [{**edge, "since_s": round(edge["since_s"], 3)} for edge in told.pop("edges")]
    return {
        "run": evidence.run_id,
        **told,
        "process": state.standing if state is not None else None,
        "as_of_s": round(evidence.age_s, 3) if evidence.snapshot is not None else None,
        "waits": edges,
    }


def _left(edge: Edge) -> str:
    if edge.left_s is None:
        return ""
    return age(edge.left_s) if edge.left_s >= 0 else "over"


def _print_answer(evidence: Evidence, answer: Answer) -> None:
    console = new_console()
    if answer.edges:
        grid = new_grid("who", "waits for", "since", "until", "owned by", right=("since", "until"))
        for edge in answer.edges[:_EDGES_SHOWN]:
            grid.add_row(edge.who, plain(edge.what), age(edge.since_s), _left(edge), ", ".join(edge.on))
        console.print(grid)
        if len(answer.edges) > _EDGES_SHOWN:
            console.print(f"and {len(answer.edges) - _EDGES_SHOWN} more (--json has all)")
        console.print()
    if evidence.snapshot is not None and not evidence.alive():
        console.print(f"from the run's files, {age(evidence.age_s)} old")
    console.print(Text(plain(answer.sentence), style=_COLOURS.get(answer.verdict, "bold red")), soft_wrap=True)
