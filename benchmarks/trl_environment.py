"""TRL's environment: where it is, and how its side is asked."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmq.common.errors import DependencyError

_ROOT = Path(__file__).resolve().parent.parent
VERSION = "1.16.0"
_TIMEOUT_S = 1800


def trl_python() -> Path:
    """The Python of TRL's environment, `$PEERS_HOME/trl`.

    Raises:
        DependencyError: it is not there.
    """
    home = Path(os.environ.get("PEERS_HOME", "~/.cache/rlmq-peers")).expanduser() / "trl"
    python = home / "bin" / "python"
    if not python.exists():
        raise DependencyError(
            "TRL",
            got=f"no virtual environment {home}",
            expected=f"one with trl {VERSION}",
            remedy=f"Run python3 -m venv {home}; {home}/bin/pip install torch==2.13.0 transformers==5.19.0 "
            f"trl=={VERSION}",
        )
    return python


def ask_trl(what: str, asked: Mapping[str, Any]) -> Any:
    """What `benchmarks/trl_side.py` answers.

    Raises:
        DependencyError: no environment.
        RuntimeError: it failed; the text is what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="rlmq-trl-") as folder:
        given, results = Path(folder) / "asked.json", Path(folder) / "results.json"
        given.write_text(json.dumps(asked), "utf-8")
        done = subprocess.run(
            [str(trl_python()), "-m", "benchmarks.trl_side", what, str(given), str(results)],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"TRL's side: {done.stderr}")
        return json.loads(results.read_text("utf-8"))
