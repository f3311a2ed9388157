"""Response lengths of emulated devices, from a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rlmq.common.errors import UsageError

_PARTS = re.compile(r"(\d+)-(\d+)-(\d+)")


@cache
def read_lengths(file: str) -> tuple[int, ...]:
    """Response lengths in tokens: a JSON list, or NAME of an object as `FILE#NAME`.

    Raises:
        UsageError: no such file, or not that.
    """
    path, _, name = file.partition("#")
    try:
        found = json.loads(Path(path).read_text())
        lengths = tuple(int(one) for one in (found[name] if name else found))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError("lengths", got=f"{file} ({error})", expected="a JSON list of token counts") from error
    if not lengths or min(lengths) < 1:
        raise UsageError("lengths", got=file, expected="at least one length, each of 1 token or more")
    return lengths


def length_of(sample_id: str, lengths: Sequence[int], prompts: int, members: int) -> int:
    """Of a sample, which is the same in every schedule and placement: steps take the list's lengths in turn.

    Args:
        sample_id: `train-STEP-GROUP-MEMBER`; others have the first length.
        lengths: of `read_lengths`.
        prompts: of a step.
        members: of a group.
    """
    match = _PARTS.search(sample_id)
    step, group, member = (int(part) for part in match.groups()) if match else (1, 0, 0)
    return lengths[(((step - 1) * prompts + group) * members + member) % len(lengths)]
