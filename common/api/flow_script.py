"""`python my_flow.py --prompts "[...]"`: a flow without a trainer, as a run in a folder of its own.

The run's recipe names the script: every process imports it by path and finds the flow in it, so that lambdas are
fine.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlmq.cli_errors import tell
from rlmq.common.dataflow import DataFlow, Node
from rlmq.common.errors import RlmqError, UsageError
from rlmq.common.lazy_model import HfModel

_LINE = re.compile(r"\b(?:rollout\.generated|node\.done|reward\.scored) .*")
_FIGURE = re.compile(r"\b(rows|filtered|no_verdict|seconds)=([0-9.]+)")
_WHAT = {"rollout": "responses"}
_REST = {"filtered": "filtered", "no_verdict": "without a verdict"}


def flow_main(flow: DataFlow, arguments: Sequence[str] | None = None) -> int:
    """Run a flow on the prompts of the command line; returns the exit code."""
    asked = _arguments(arguments)
    try:
        spec = _spec_of(flow)
        prompts = _prompts(asked.prompts, asked.file)
        folder = Path(asked.folder or tempfile.mkdtemp(prefix="rlmq-flow-")).absolute()
        recipe = flow_recipe(flow, spec, folder, max_tokens=asked.max_tokens)
        run = _run(recipe, prompts, folder)
        for name in flow.graph().order:
            if name != "prompts":
                print(_line(name, run.path))
        print(f"rewards: {[round(value, 4) for value in run.rewards()]}")
    except RlmqError as error:
        return int(tell(error))
    return 0


def flow_recipe(flow: DataFlow, spec: str, folder: Path, *, max_tokens: int = 128) -> dict[str, Any]:
    """The recipe of a flow that trains nothing.

    Args:
        flow: with a node `rollout`, which has a model, and a node `reward`, which has a function.
        spec: `my_flow.py:flow`.
        folder: where the run lies; its `prompts.jsonl` are the prompts.

    Raises:
        UsageError: the graph is wrong, or one of those nodes is missing.
    """
    flow.graph()
    model = flow.node("rollout").model
    if model is None:
        raise UsageError("node rollout", got="no model", expected='model=load_hf_model("...")')
    if flow.node("reward").forward_fn is None:
        raise UsageError("node reward", got="no forward_fn", expected="a reward function")
    prompts = str(folder / "prompts.jsonl")
    return {
        "run": {"name": "flow", "folder": str(folder / "runs")},
        "model": _beside(model.name if isinstance(model, HfModel) else model, spec),
        "algorithm": {"name": "score"},
        "data": {"train": prompts, "eval": {"prompts": prompts}},
        "rollout": {"max_response_tokens": max_tokens},
        "reward": [{"function": spec, "name": "reward"}],
        "nodes": [node_block(flow, node, spec) for node in flow.nodes if not node.built_in],
        "train": {"steps": 1},
    }


def node_block(flow: DataFlow, node: Node, spec: str) -> dict[str, Any]:
    """A node as an item of a recipe's `nodes`. Raises UsageError: an edge that no recipe can have."""
    block: dict[str, Any] = {
        "name": node.name,
        "function": spec,
        "reads": list(node.reads),
        "writes": {
            name: kind if isinstance(kind, str) else _kind(kind) for name, kind in (node.writes or {}).items()
        },
        "reason": node.reason,
        "scope": node.scope,
        "workers": node.workers,
        "min_batch": node.min_batch,
        "before": [one.name for one in flow.nodes if node.name in flow.edges_to(one.name)],
    }
    if node.keep is not None:
        block["keep"] = node.keep
    return block


def _kind(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


@dataclass(frozen=True, slots=True)
class _Run:
    path: Path

    def rewards(self) -> list[float]:
        """Of the rows that came through, in the order of the prompts."""
        import pyarrow.parquet as pq

        rows = pq.read_table(self.path / "samples" / "eval-000000.parquet", columns=["sample_id", "reward"])
        return [value for value in rows.sort_by("sample_id")["reward"].to_pylist() if value is not None]


def _run(recipe: dict[str, Any], prompts: Sequence[str], folder: Path) -> _Run:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    (folder / "prompts.jsonl").write_text("".join(lines))
    path = folder / "flow.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
    command = [sys.executable, "-P", "-m", "rlmq.cli", "up", "--fresh", str(path)]
    with (folder / "up.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        print((folder / "up.log").read_text(), end="", file=sys.stderr)
        raise SystemExit(code)
    runs = sorted((folder / "runs").glob("flow-*/summary.json"), key=lambda one: one.stat().st_mtime)
    return _Run(runs[-1].parent)


def _line(node: str, run: Path) -> str:
    """`[safety] 2 samples in 0.1 s, 1 filtered`, from the logs of the node's workers."""
    sums = {"rows": 0.0, "filtered": 0.0, "no_verdict": 0.0, "seconds": 0.0}
    for log in sorted((run / "logs").glob(f"{node}-*.log")):
        for line in _LINE.findall(log.read_text(errors="replace")):
            for name, value in _FIGURE.findall(line):
                sums[name] += float(value)
    told = [f"{int(sums[name])} {what}" for name, what in _REST.items() if sums[name]]
    head = f"[{node}] {int(sums['rows'])} {_WHAT.get(node, 'samples')} in {sums['seconds']:.1f} s"
    return ", ".join([head, *told])


def _spec_of(flow: DataFlow) -> str:
    """`/path/my_flow.py:flow`: the script, and the flow's name in it."""
    script = sys.modules["__main__"]
    file = getattr(script, "__file__", None)
    names = [name for name, value in vars(script).items() if value is flow]
    if file is None or not names:
        raise UsageError(
            "flow.main()",
            got="a flow that is no variable of the script",
            expected="`flow = DataFlow(...)` at the top of a file, and flow.main() below it",
        )
    return f"{Path(file).resolve()}:{names[0]}"


def _beside(model: str, spec: str) -> str:
    """A model's file or folder that lies beside the script, by its whole path; a hub id as it is."""
    beside = Path(spec).parent / model.partition(":")[0]
    return str(Path(spec).parent / model) if beside.exists() else model


def _prompts(text: str | None, file: Path | None) -> list[str]:
    if (text is None) == (file is None):
        raise UsageError("prompts", got="both or none of --prompts and --file", expected="one of them")
    if file is not None:
        try:
            return [line for line in file.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise UsageError("--file", got=f"{file}: {error.strerror}", expected="a text file") from error
    try:
        found = ast.literal_eval(text or "")
    except (ValueError, SyntaxError):
        found = None
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) for one in found):
        raise UsageError("--prompts", got=f"{text!r:.80}", expected="a list of texts, like \"['a', 'b']\"")
    return list(found)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run this flow: prompts, rollout, nodes, reward.")
    parser.add_argument("--prompts", metavar="LIST", help="the prompts, as a Python list of texts")
    parser.add_argument("--file", type=Path, help="a text file with a prompt per line")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest response in tokens")
    parser.add_argument("--folder", help="where the run lies; default: a new temporary folder")
    return parser.parse_args(arguments)
