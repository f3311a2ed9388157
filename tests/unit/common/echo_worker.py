"""A worker with the echo role as a process of its own: FOLDER URL DRAIN_S."""

from __future__ import annotations

import sys
from pathlib import Path

from test_worker_loop import RECIPE, Echo

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.logs import configure
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker_loop import Worker

if __name__ == "__main__":
    folder, url, drain_s = sys.argv[1:]
    recipe = RECIPE.model_copy(
        update={"deadlines": RECIPE.deadlines.model_copy(update={"drain_s": float(drain_s)})}
    )
    calls = RedisCalls(url, run_id="loop")
    worker = Worker(recipe, Path(folder), RunFolder(Path(folder)), "reward", 0, calls, "f", configure("reward", 0))
    sys.exit(worker.run(Echo))
