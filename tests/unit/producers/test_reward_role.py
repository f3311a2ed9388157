"""The reward role over a real store and real function processes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, RowRange, Stage, Table
from rlmq.common.calls import Desired
from rlmq.common.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, arrow_schema
from rlmq.common.errors import DeadlineExceeded, UsageError
from rlmq.common.flow import sample_columns, sample_flow
from rlmq.common.logs import configure
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.consumers.reward_figures import reward_figures
from rlmq.producers.reward import RewardRole

SOURCE = """
import time
def length(completions, **_): return [len(c) for c in completions]
def odd(completions, n, **_): return [float(x % 2) for x in n]
def picky(completions, n, **_): return [1.0 if x % 2 else None for x in n]
def nothing(completions, **_): return [None] * len(completions)
def broken(completions, **_): raise ValueError("no such answer")
def poisoned(completions, n, **_):
    with open(__file__ + ".calls", "a") as calls: print(*n, file=calls)
    if 1 in n: raise ValueError("no such answer")
    return [1.0] * len(completions)
def nan(completions, n, **_): return [float("nan") if x == 0 else 1.0 for x in n]
def slow(completions, **_):
    time.sleep(3)
    return [1.0] * len(completions)
def hanging(completions, **_): time.sleep(600)
def compute_score(data_source, solution_str, ground_truth, extra_info): return float(solution_str == ground_truth)
def mixed(completions, **_):
    given = {"x": {"score": 0.5, "pred": "x", "acc": True}, "yy": 0.25, "zzz": {"score": 0.5, "pred": "zzz"}}
    return [given[text] for text in completions]
def first(completions, **_): return [float(i == 0) for i in range(len(completions))]
"""


class Bench:
    """A store with the two tables, rows that have responses, and a reward role."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.url = redis_url
        self.log = io.StringIO()
        (folder / "rewards.py").write_text(SOURCE)
        self.lease_s = 60.0
        self.min_batch = 1
        self.deterministic = False
        self.controller: str | None = None
        self.puts = 0
        self.roles: list[RewardRole] = []
        self.stores: list[RedisStore] = []
        self.calls = RedisCalls(redis_url, run_id="t")

    def open(self, *blocks: dict[str, Any], **rollout: Any) -> RewardRole:
        recipe = Recipe.model_validate(
            {
                "run": {"name": "t"},
                "model": "./m",
                "data": {"train": "t.jsonl"},
                "reward": tuple({"timeout_s": 20.0, **block} for block in blocks),
                "rollout": {"batch_size_per_device": 8, **rollout},
                "train": {"steps": 3},
                "stages": {"reward": {"min_batch": self.min_batch}},
                "deterministic": self.deterministic,
                "reward_controller": self.controller,
            }
        )
        self.recipe = recipe
        self.columns = sample_columns(sample_flow(recipe.reward_names))
        stages = (
            Stage("rollout", needs=("prompt_ids",), scope="chunk"),
            Stage("reward", needs=("response_text",), lease_s=self.lease_s, min_batch=self.min_batch),
        )
        after = (Stage("actor", needs=("reward",)), Stage("recorder", needs=(), ended=True))
        tables = (
            Table("train", self.columns, (*stages, *after)),
            Table("eval", self.columns, (*stages, Stage("evaluation", needs=("reward",)))),
        )
        self.store = RedisStore(self.url, run_id="t", worker="test")
        self.store.open(tables)
        own = RedisStore(self.url, run_id="t", worker="reward-0")
        own.open(tables)
        self.stores += [self.store, own]
        self.progress = 0
        context = WorkerContext(
            recipe=recipe,
            recipe_folder=self.folder,
            run=RunFolder(self.folder / "runs" / "t-1"),
            role="reward",
            rank=0,
            world_size=1,
            incarnation=1,
            calls=self.calls,
            log=configure("reward", 0, stream=self.log),
            activity=lambda _: None,
            progress=self._progress,
            serving=lambda _: None,
            desired=lambda: None,
            stopping=lambda: False,
        )
        role = RewardRole(context, own)
        self.roles.append(role)
        return role

    def _progress(self) -> None:
        self.progress += 1

    def put(self, *texts: str, table: str = "train", truncated: bool = False, step: int = 1, **fields: Any) -> None:
        """One chunk, generated: record n counts within the chunk."""
        self.puts += 1
        prompts = [
            {
                "sample_id": f"{table}-{step:06d}-{self.puts:04d}-{i:02d}",
                "group_id": f"{table}-{step:06d}-{self.puts:04d}",
                "step": step,
                "source": table,
                "prompt_ids": [1, 2],
                "prompt_text": "rendered",
                "record": json.dumps({"prompt": "asked", "n": i, **fields}),
            }
            for i in range(len(texts))
        ]
        batch = pa.RecordBatch.from_pylist(prompts, schema=arrow_schema(PROMPT_COLUMNS))
        self.store.put(table, batch, producer="prompts", sequence=self.puts, group_size=len(texts))
        claim = self.store.claim(table, "rollout", max_rows=1000, columns=("sample_id",))
        assert claim is not None
        made = [
            {
                "response_ids": [3],
                "response_text": text,
                "rollout_logprobs": [-0.5],
                "loss_mask": [True],
                "policy_versions": [0],
                "truncated": truncated,
            }
            for text in texts
        ]
        self.store.write(claim, pa.RecordBatch.from_pylist(made, schema=arrow_schema(ROLLOUT_COLUMNS)), ack=True)

    def claim(self, stage: str, table: str = "train") -> Claim | None:
        return self.store.claim(table, stage, max_rows=1000)

    def rewards(self, stage: str = "actor", table: str = "train", column: str = "reward") -> list[float | None]:
        claim = self.claim(stage, table)
        return [] if claim is None else claim.rows.column(column).to_pylist()

    def close(self) -> None:
        for role in self.roles:
            role.close()
        for store in self.stores:
            store.close()
        self.calls.close()


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    made = Bench(tmp_path, redis_url)
    yield made
    made.close()


def block(function: str, **more: Any) -> dict[str, Any]:
    return {"function": f"rewards.py:{function}", **more}


def test_rows_get_the_weighted_sum_and_its_parts(bench: Bench) -> None:
    role = bench.open(block("length", weight=0.5), block("odd", weight=2.0, name="parity"))
    bench.put("a", "bb", "ccc")

    assert role.work()

    claim = bench.claim("actor")
    assert claim is not None
    assert claim.rows.column("reward").to_pylist() == [0.5, 3.0, 1.5]
    assert claim.rows.column("reward.length").to_pylist() == [1.0, 2.0, 3.0]
    assert claim.rows.column("reward.parity").to_pylist() == [0.0, 1.0, 0.0]
    assert not role.work()


def test_verl_columns_reach_a_verl_function(bench: Bench) -> None:
    role = bench.open(block("compute_score"))
    bench.put("yes", "no", reward_model={"ground_truth": "yes"}, data_source="d", extra_info={})

    role.work()

    assert bench.rewards() == [1.0, 0.0]


@pytest.mark.parametrize("texts", [("x", "yy", "zzz"), ("zzz", "yy", "x")])
def test_what_dicts_have_beside_their_scores_is_a_column(bench: Bench, texts: tuple[str, ...]) -> None:
    role = bench.open(block("mixed"), block("length"))
    bench.put(*texts)

    role.work()

    claim = bench.claim("actor")
    assert claim is not None
    assert claim.rows.column("reward.mixed").to_pylist() == [0.25 if text == "yy" else 0.5 for text in texts]
    kept = {"x": {"pred": "x", "acc": True}, "yy": None, "zzz": {"pred": "zzz"}}
    found = [text and json.loads(text) for text in claim.rows.column("reward_fields").to_pylist()]
    assert found == [kept[text] and {"mixed": kept[text]} for text in texts]
    figures = reward_figures(claim.rows.to_pydict())
    assert figures == {"reward.mixed": 1.25 / 3, "reward.length": 2.0, "reward.mixed.acc": 1.0}


def test_one_functions_none_does_not_count_for_that_row(bench: Bench) -> None:
    role = bench.open(block("length"), block("picky", weight=10.0))
    bench.put("a", "bb", "ccc")

    role.work()

    claim = bench.claim("actor")
    assert claim is not None
    assert claim.rows.column("reward").to_pylist() == [1.0, 12.0, 3.0]
    assert claim.rows.column("reward.picky").to_pylist() == [None, 1.0, None]


def test_a_train_row_without_any_value_ends_as_filtered_and_the_others_go_on(bench: Bench) -> None:
    role = bench.open(block("picky"))
    bench.put("a", "b", "c", "d")

    role.work()

    counts = bench.store.counts("train")
    assert counts.ended == {"filtered(no_verdict)": 2}
    assert counts.live == 2
    assert bench.rewards() == [1.0, 1.0]
    ended = bench.claim("recorder")
    assert ended is not None
    assert ended.rows.column("reward").to_pylist() == [None, None]
    assert ended.rows.column("response_text").to_pylist() == ["a", "c"]


def test_a_row_for_which_a_function_always_raises_is_a_dead_letter_with_its_traceback(bench: Bench) -> None:
    # given a function that raises for one row of a group, and another one that gives that row a value
    role = bench.open(block("poisoned"), block("length"))
    bench.put("a", "bb", "ccc")
    # when
    role.work()
    # then it was tried alone as often as rows are delivered, and is dead; its siblings have their rewards
    calls = (bench.folder / "rewards.py.calls").read_text().split("\n")
    assert calls.count("1") == bench.recipe.stages.reward.max_deliveries == 3
    assert bench.store.counts("train").ended == {"dead(ValueError: no such answer)": 1}
    [letter] = bench.store.dead_letters("train")
    assert (letter.stage, letter.range.first, letter.range.count) == ("reward", 1, 1)
    assert letter.reason.startswith("Traceback") and "rewards.py" in letter.reason
    claim = bench.claim("actor")
    assert claim is not None
    assert claim.rows.column("reward").to_pylist() == [2.0, 4.0]
    # and when it is tried again with a function that was mended, it has one too
    (bench.folder / "rewards.py").write_text(SOURCE.replace("if 1 in n", "if 7 in n"))
    assert bench.store.retry(letter) == 1
    bench.open(block("poisoned"), block("length")).work()
    again = bench.claim("actor")
    assert again is not None and again.rows.column("reward").to_pylist() == [3.0]


def test_in_an_evaluation_such_a_row_has_no_verdict(bench: Bench) -> None:
    role = bench.open(block("poisoned"))
    bench.put("a", "b", table="eval")
    role.work()
    claim = bench.claim("evaluation", table="eval")
    assert claim is not None and claim.rows.column("reward").to_pylist() == [1.0, None]


def test_a_call_without_verdicts_filters_the_whole_claim(bench: Bench) -> None:
    role = bench.open(block("nothing"))
    bench.put("a", "b")

    assert role.work()

    assert bench.store.counts("train").ended == {"filtered(no_verdict)": 2}
    assert bench.store.counts("train").live == 0
    assert role.handlers()["failures"]({})["count"] == 2


def test_the_reason_is_kept_for_the_controller_and_logged_once(bench: Bench) -> None:
    role = bench.open(block("broken"))
    for _ in range(3):
        bench.put("a")
        role.work()

    failures = role.handlers()["failures"]({})

    assert failures["count"] == 3
    assert "no such answer" in failures["last"]
    assert "rewards.py:7" in failures["last"]
    assert bench.log.getvalue().count("reward.no_verdict") == 1


def test_nan_is_no_verdict_for_its_row(bench: Bench) -> None:
    role = bench.open(block("nan"))
    bench.put("a", "b")

    role.work()

    assert bench.rewards() == [1.0]
    assert "nan" in role.handlers()["failures"]({})["last"]


def test_a_hanging_function_gives_no_verdict_and_the_next_rows_are_scored(bench: Bench) -> None:
    role = bench.open(block("hanging", timeout_s=1.0), block("length"))
    bench.put("a", "bb")

    role.work()

    claim = bench.claim("actor")
    assert claim is not None
    assert claim.rows.column("reward").to_pylist() == [1.0, 2.0]
    assert claim.rows.column("reward.hanging").to_pylist() == [None, None]


def test_an_evaluation_row_without_verdict_goes_on_with_a_null_reward(bench: Bench) -> None:
    role = bench.open(block("picky"))
    bench.put("a", "b", "c", table="eval")

    assert role.work()

    assert bench.store.counts("eval").live == 3
    assert bench.rewards("evaluation", "eval") == [None, 1.0, None]


def test_cut_responses_pay_the_penalty_only_where_the_recipe_says_so(bench: Bench) -> None:
    role = bench.open(block("length", weight=2.0), truncated="penalise", truncation_penalty=0.75)
    bench.put("aa", truncated=True)
    bench.put("bb")

    role.work()
    role.work()

    assert bench.rewards() == [3.25, 4.0]
    assert bench.rewards() == []


def test_a_long_call_keeps_its_lease(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmq.producers.reward._EXTEND_EVERY_S", 0.3)
    bench.lease_s = 1.5
    role = bench.open(block("slow"))
    bench.put("a")

    role.work()

    assert bench.rewards() == [1.0]
    assert bench.store.counts("train").redelivered == 0
    assert bench.progress >= 2


def test_a_lost_lease_leaves_the_rows_to_the_other_worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmq.producers.reward._EXTEND_EVERY_S", 600.0)
    bench.lease_s = 0.5
    role = bench.open(block("slow"))
    bench.put("a")
    taken: list[Claim | None] = []
    other = threading.Timer(1.5, lambda: taken.append(bench.claim("reward")))

    other.start()
    assert role.work()
    other.join()

    assert "reward.lease_lost" in bench.log.getvalue()
    assert taken[0] is not None
    assert taken[0].ranges[0].delivery == 2
    assert bench.store.counts("train").acked["reward"] == 0


def test_rows_of_one_chunk_are_scored_in_one_call_in_their_order(bench: Bench) -> None:
    role = bench.open(block("first"))
    bench.put("a", "b", "c", "d", "e", "f", "g", "h")
    bench.put("i", "j", "k", "l", "m", "n", "o", "p")

    while role.work():
        pass

    assert bench.rewards() == ([1.0] + [0.0] * 7) * 2


def test_a_claim_waits_for_the_stages_min_batch_and_takes_that_many_at_once(bench: Bench) -> None:
    # given a stage that hands out 16 rows at least, two groups
    bench.min_batch = 16
    role = bench.open(block("length"))
    bench.put(*"abcdefgh")
    # then 8 are not enough, of 24 it takes 16, and the rest when the step has no more
    assert not role.work()
    bench.put(*"abcdefgh")
    bench.put(*"ijklmnop")
    assert role.work()
    assert not role.work()
    bench.store.flush("train")
    assert role.work()
    assert re.findall(r"reward\.scored .*rows=(\d+)", bench.log.getvalue()) == ["16", "8"]
    assert bench.rewards() == [1.0] * 24


def test_the_store_is_told_the_recipe_and_each_functions_source(bench: Bench) -> None:
    (bench.folder / "other.py").write_text(SOURCE + "# another file\n")
    role = bench.open(block("length"), {"function": "other.py:length"})
    bench.put("a")

    role.work()

    [written] = [
        one for one in bench.store.lineage("train", [RowRange("prompts.1", 0, 1)]) if "reward" in one.columns
    ]
    hashes = [hashlib.sha256((bench.folder / name).read_bytes()).hexdigest() for name in ("rewards.py", "other.py")]
    assert written.writer == "reward-0"
    assert written.tag == f"config {recipe_hash(bench.recipe)} functions {hashes[0][:16]} {hashes[1][:16]}"


def test_a_weight_that_an_operator_set_counts_from_its_step_on(bench: Bench) -> None:
    # given a weight that is 3 from step 5 on, and 4 from step 7 on
    role = bench.open(block("length", weight=0.5), block("odd", weight=2.0))
    settings = {"reward.length.weight": [(5, "3"), (7, "4.0")], "reward.gone.weight": [(1, "9")]}
    bench.calls.want(Desired(role="reward", version=1, phase="run", settings=settings))
    # when rows of several steps are scored, the later ones first
    for step in (7, 6, 5, 4):
        bench.put("aa", step=step)
        assert role.work()
    # then each has the weights of its step
    assert bench.rewards() == [8.0, 6.0, 6.0, 1.0]
    # and the lineage says which, where they are not the recipe's
    chunks = [RowRange(f"prompts.{n}", 0, 1) for n in (1, 2, 3, 4)]
    tags = [one.tag for one in bench.store.lineage("train", chunks) if "reward" in one.columns]
    config = f"config {recipe_hash(bench.recipe)} functions "
    assert [tag.partition(config)[0] for tag in tags] == ["weights 4 2 ", "weights 3 2 ", "weights 3 2 ", ""]


def test_a_controller_of_weights_decides_by_step_and_an_operator_above_it(bench: Bench) -> None:
    # given a function that turns the first reward off from step 3 on, and an operator who set it from step 4 on
    (bench.folder / "c.py").write_text("def by_step(step): return {'length': 1.0 if step < 3 else 0.0}\n")
    bench.controller = "c.py:by_step"
    role = bench.open(block("length", weight=0.5), block("odd", weight=2.0))
    settings = {"reward.length.weight": [(4, "3")]}
    bench.calls.want(Desired(role="reward", version=1, phase="run", settings=settings))
    # when rows of three steps are scored
    for step in (2, 3, 4):
        bench.put("aa", step=step)
        assert role.work()
    # then each has the weights of its step, and the lineage says which
    assert bench.rewards() == [2.0, 0.0, 6.0]
    chunks = [RowRange(f"prompts.{n}", 0, 1) for n in (1, 2, 3)]
    tags = [one.tag for one in bench.store.lineage("train", chunks) if "reward" in one.columns]
    assert [tag.partition(" config ")[0] for tag in tags] == ["weights 1 2", "weights 0 2", "weights 3 2"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{'lenght': 1.0}", "got 'lenght', expected weights by name, of length"),
        ("{'length': float('nan')}", "got length: nan, expected a finite number"),
        ("3", "expected weights by name"),
        ("1 / 0", "ZeroDivisionError at .*c.py:1"),
    ],
)
def test_a_controller_of_weights_that_cannot_be_is_refused(bench: Bench, body: str, told: str) -> None:
    (bench.folder / "c.py").write_text(f"def by_step(step): return {body}\n")
    bench.controller = "c.py:by_step"

    with pytest.raises(UsageError, match=told):
        bench.open(block("length"))


def test_a_weight_set_while_the_worker_runs_is_seen_with_the_next_steps_rows(bench: Bench) -> None:
    # given a worker that has scored rows of step 1, and then a setting from step 2 on that rang no bell
    role = bench.open(block("length"))
    bench.put("aa", step=1)
    role.work()
    changed = Desired(role="reward", version=1, phase="run", settings={"reward.length.weight": [(2, "5")]})
    bench.calls.want(changed)
    # when rows of both steps come
    for step in (1, 2):
        bench.put("aa", step=step)
        role.work()
    # then the step decides
    assert bench.rewards() == [2.0, 2.0, 10.0]


def test_wait_wakes_when_a_response_comes(bench: Bench) -> None:
    role = bench.open(block("length"))
    bench.put("a")
    began = time.monotonic()
    wake, other = os.pipe()

    role.wait(30.0, wake)

    assert time.monotonic() - began < 10
    os.close(wake)
    os.close(other)


def test_an_unusable_function_is_refused_at_start_and_leaves_no_process(bench: Bench) -> None:
    before = children()

    with pytest.raises(UsageError, match=r"rewards\.py:lengthh.*Did you mean rewards\.py:length\?"):
        bench.open(block("length"), block("lengthh"))

    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_reward_process_needs_neither_torch_nor_much_memory() -> None:
    program = (
        "import sys, rlmq.producers.reward, rlmq.consumers.recorder, rlmq.controller.trackers\n"
        "import rlmq.buffer.redis_store, rlmq.common.worker_loop, rlmq.common.logs\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "kib = next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('VmRSS'))\n"
        "print(sorted(heavy), kib // 1024)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    heavy, _, mib = done.stdout.strip().rpartition(" ")
    assert heavy == "[]"
    assert int(mib) < 200


def test_in_deterministic_mode_the_clock_gives_no_verdict(bench: Bench) -> None:
    bench.deterministic = True
    role = bench.open({"function": "rewards.py:hanging", "timeout_s": 0.5})
    bench.put("a", "b")
    with pytest.raises(DeadlineExceeded, match="the clock decides none"):
        role.work()
    assert bench.store.counts("train").ended == {}
