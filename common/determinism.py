"""What the bits of deterministic mode depend on beside the recipe: recorded when a run begins, the same ever after.

The next process of a role compares itself with `environment/<role>.json`: versions, threads and instruction set
choose the kernels, and these the order of sums.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import msgspec
import structlog

from rlmq.common.errors import UsageError
from rlmq.common.worker import WorkerContext

_log = structlog.get_logger(__name__)


class Environment(msgspec.Struct, frozen=True):
    """Where a role computes. All must stay the same but `processor`, which is told when it changes."""

    torch: str
    transformers: str
    python: str
    threads: int
    instruction_set: str
    processor: str

    @classmethod
    def here(cls) -> Environment:
        """This process's."""
        import torch

        return cls(
            torch=version("torch"),
            transformers=version("transformers"),
            python=platform.python_version(),
            threads=torch.get_num_threads(),
            instruction_set=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            processor=_processor(),
        )


def require_same_environment(context: WorkerContext) -> None:
    """In deterministic mode: record where this role computes, or compare it with the record.

    Raises:
        UsageError: another version, number of threads or instruction set than when the run began; both are named.
    """
    if not context.recipe.deterministic:
        return
    here, path = Environment.here(), context.run.environment / f"{context.role}.json"
    recorded = _recorded(path, here)
    for name in ("torch", "transformers", "python", "threads", "instruction_set"):
        before, now = getattr(recorded, name), getattr(here, name)
        if before != now:
            raise UsageError(
                f"{name.replace('_', ' ')} of {context.role} in deterministic mode",
                got=now,
                expected=f"{before}, as when the run began ({path})",
                remedy="Go on where it is the same, or start anew with --fresh",
            )
    if recorded.processor != here.processor:
        _log.warning("another processor: the last bits may differ", before=recorded.processor, now=here.processor)


def _recorded(path: Path, here: Environment) -> Environment:
    """The record; made by the first process of the role."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f".{path.name}.{os.getpid()}")
    own.write_bytes(msgspec.json.format(msgspec.json.encode(here)))
    try:
        os.link(own, path)  # only one of several processes is the first
    except FileExistsError:
        return msgspec.json.decode(path.read_bytes(), type=Environment)
    finally:
        own.unlink()
    return here


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
