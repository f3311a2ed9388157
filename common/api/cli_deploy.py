"""`rlmq deploy`: files that run a recipe under systemd or Docker Compose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.deploying.render import KINDS


def deploy_command(kind: str, path: Path, overrides: Sequence[str], out: Path) -> int:
    """`rlmq deploy`. Writes the files of one kind into a folder; those of a former rendering are replaced.

    Raises:
        UsageError: an unknown kind, a recipe that cannot be deployed, or a folder that holds something else.
    """
    if kind not in KINDS:
        raise UsageError("KIND", got=repr(kind), expected=f"one of {', '.join(KINDS)}")
    files = KINDS[kind](load_recipe(path, overrides))
    if out.exists() and not out.is_dir():
        raise UsageError("--output", got=str(out), expected="a folder")
    for name, text in files.items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            target.chmod(0o755)
    print(f"{out}: {len(files)} files; begin with {out / 'README.md'}")
    return 0
