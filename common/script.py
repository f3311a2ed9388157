"""A Python script as a recipe and as a control loop.

The script declares a run (`rlmq.Run`, `rlmq.PPOTrainer`). Run by hand it does what `rlmq up` does with it; run with
`RECIPE_TO` in its environment it writes the recipe there and ends; and in the controller it *is* the loop: the
same file is run once more, with a `Steering` behind its handles. No other process runs it: they have the recipe.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmq.common.errors import RlmqError, UsageError
from rlmq.common.processes import spawn

RECIPE_TO = "RLMQ_RECIPE_TO"
"""Environment variable: the file to which a script writes its recipe."""
_WRITES_S = 300.0
_TOLD_LINES = 3
_bound: list[Any] = []


def steering() -> Any:
    """The Steering of the run that this process controls, or None."""
    return _bound[-1] if _bound else None


def run_script(path: Path, run: Any) -> None:
    """Run the file as a script that steers `run`; where it ends, or exits with 0, the loop has ended.

    Raises:
        UsageError: it raises, or exits otherwise.
    """
    from rlmq.common.user_code import user_error

    _bound.append(run)
    before = sys.argv
    sys.argv = [str(path)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except RlmqError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise user_error(error, path, subject=f"script {path}") from error
    except Exception as error:  # whatever the user's script does
        raise user_error(error, path, subject=f"script {path}") from error
    finally:
        sys.argv = before
        _bound.pop()


def recipe_of_script(path: Path) -> str:
    """The recipe that a script declares, as YAML: the script is run in a process of its own.

    Raises:
        UsageError: it declares none, raises, or does not end.
    """
    with tempfile.TemporaryDirectory(prefix="rlmq-script-") as folder:
        to, errors = Path(folder) / "recipe.yaml", Path(folder) / "errors"
        with errors.open("wb") as told:
            child = spawn(
                [sys.executable, str(path.absolute())], env={**os.environ, RECIPE_TO: str(to)}, errors=told
            )
            try:
                code = child.wait(timeout=_WRITES_S)
            except subprocess.TimeoutExpired as error:
                raise UsageError(
                    f"script {path}", got=f"no end after {_WRITES_S:g} s", expected="rlmq.Run(...).main(loop)"
                ) from error
            finally:
                child.kill()
                child.wait()
        if to.is_file():
            return to.read_text("utf-8")
        lines = errors.read_text("utf-8", "replace").strip().splitlines()[-_TOLD_LINES:]
    last = lines[-1].removeprefix("rlmq.common.errors.UsageError: ") if lines else ""
    raise UsageError(
        f"script {path}",
        got=f"exit code {code}" + (f": {last}" if last else " and no declared run"),
        expected="a script that calls rlmq.Run(...).main(loop) or the step() of a trainer",
    )


def write_recipe(text: str) -> None:
    """Leave the recipe where `recipe_of_script` looks."""
    Path(os.environ[RECIPE_TO]).write_text(text, encoding="utf-8")


def asked_for_recipe(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process shall write its recipe, and no more."""
    return RECIPE_TO in environment


def must_be_main(what: str) -> None:
    """Refuse to begin a run in a process that only imports the script, for a function of it.

    Raises:
        UsageError: it does.
    """
    if getattr(sys.modules["__main__"], "__spec__", None) is not None:
        raise UsageError(what, got="a script that is imported", remedy='Put it below `if __name__ == "__main__":`')
