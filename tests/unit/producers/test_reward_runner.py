"""Reward functions in their child process: signatures, values, and every way in which a function can misbehave."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.algorithm import ScoredBatch
from rlmq.common.errors import UsageError
from rlmq.common.recipe.reward_block import RewardBlock
from rlmq.common.recipe.schema import Recipe
from rlmq.producers.process_runner import ProcessRewardRunner
from rlmq.producers.reward_runner import RewardRow

Start = Callable[..., ProcessRewardRunner]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Writes `rewards.py` with this source and starts a runner for its function `f`."""
    runners: list[ProcessRewardRunner] = []

    def begin(source: str, *, timeout_s: float = 20.0, function: str = "rewards.py:f", **options: Any) -> Any:
        (tmp_path / "rewards.py").write_text(source)
        waiting = options.pop("while_waiting", None)
        block = RewardBlock(function=function, timeout_s=timeout_s, arguments=options)
        runners.append(ProcessRewardRunner(block, "f", tmp_path, while_waiting=waiting))
        return runners[-1]

    yield begin
    for runner in runners:
        runner.close()


def rows(count: int = 4, **fields: Any) -> list[RewardRow]:
    return [RewardRow(f"prompt {i}", f"text {i}", {"n": i, **fields}) for i in range(count)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# Signatures


def test_trl_function_gets_prompts_completions_and_columns_as_lists(start: Start) -> None:
    runner = start(
        "def f(prompts, completions, n, **columns):\n"
        "    assert prompts == ['prompt 0', 'prompt 1'] and completions == ['text 0', 'text 1']\n"
        "    assert columns == {'ok': [True, True], 'year': [None, None]}, columns\n"
        "    return [float(x) for x in n]\n"
    )

    verdicts = runner.score(rows(2, ok=True, year=None))

    assert verdicts.failure == ""
    assert verdicts.values == [0.0, 1.0]


def test_a_prompt_of_messages_gives_a_completion_of_one_assistant_message(start: Start) -> None:
    runner = start(
        "def f(prompts, completions, **columns):\n"
        "    assert prompts[0][0]['content'] == 'hi'\n"
        "    assert completions == [[{'role': 'assistant', 'content': 'yo'}]]\n"
        "    return [1]\n"
    )

    verdicts = runner.score([RewardRow([{"role": "user", "content": "hi"}], "yo", {})])

    assert (verdicts.failure, verdicts.values) == ("", [1.0])


def test_a_function_without_keyword_rest_gets_only_the_columns_that_it_names(start: Start) -> None:
    runner = start("def f(completions, n):\n    return n\n")

    assert runner.score(rows(3, other="x")).values == [0.0, 1.0, 2.0]


def test_a_column_that_only_some_rows_have_is_none_in_the_others(start: Start) -> None:
    runner = start("def f(completions, a, **_):\n    return [0.0 if x is None else x for x in a]\n")

    verdicts = runner.score([RewardRow("p", "c", {}), RewardRow("p", "c", {"a": 2}), RewardRow("p", "c", {"a": 3})])

    assert verdicts.values == [0.0, 2.0, 3.0]


def test_a_needed_column_that_the_data_lack_is_named(start: Start) -> None:
    runner = start("def f(completions, answer):\n    return [1.0 for _ in answer]\n")

    verdicts = runner.score(rows(2))

    assert verdicts.values == [None, None]
    assert "rewards.py:f" in verdicts.failure
    assert "'answer'" in verdicts.failure
    assert "n, prompts" in verdicts.failure


def test_fields_keep_their_python_types(start: Start) -> None:
    fields = {
        "big": 2**80,
        "real": 0.1,
        "none": None,
        "flag": True,
        "deep": {"k": [0.5, {"t": []}]},
        "text": "ä\ud800",
    }
    runner = start(
        "def f(completions, **c):\n"
        f"    expected = {fields!r}\n"
        "    got = {k: v[0] for k, v in c.items() if k not in ('prompts', 'n')}\n"
        "    assert got == expected, got\n"
        "    assert [type(v) for v in got.values()] == [type(v) for v in expected.values()], got\n"
        "    return [1.0]\n"
    )

    assert runner.score(rows(1, **fields)).failure == ""


def test_verl_function_gets_the_ground_truth_of_the_row(start: Start) -> None:
    runner = start(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'gsm' and extra_info == {'index': 3}\n"
        "    return float(solution_str.endswith(ground_truth))\n"
    )

    verdicts = runner.score(
        rows(3, data_source="gsm", reward_model={"ground_truth": "1", "style": "rule"}, extra_info={"index": 3})
    )

    assert verdicts.values == [0.0, 1.0, 0.0]


def test_verl_function_without_a_ground_truth_in_the_row_has_no_verdict(start: Start) -> None:
    runner = start("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")

    verdicts = runner.score(rows(2))

    assert verdicts.values == [None, None]
    assert "ground_truth" in verdicts.failure


def test_verls_batch_function_gets_all_rows_at_once(start: Start) -> None:
    runner = start(
        "def f(data_sources, solution_strs, ground_truths, extra_infos, scale):\n"
        "    assert len({len(data_sources), len(solution_strs), len(ground_truths), len(extra_infos)}) == 1\n"
        "    assert extra_infos[1] == {'index': 3}\n"
        "    return [scale * text.endswith(truth) for text, truth in zip(solution_strs, ground_truths)]\n",
        scale=2.0,
    )

    given = rows(3, data_source="gsm", reward_model={"ground_truth": "1"}, extra_info={"index": 3})

    assert runner.score(given).values == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "end", ["raise ValueError('odd')", "os._exit(3)", "time.sleep(60)"], ids=["raises", "dies", "hangs"]
)
def test_a_row_that_ends_a_call_takes_no_other_rows_verdict(start: Start, end: str) -> None:
    runner = start(
        "import os, time\n"
        "def f(completions, n, **_):\n"
        f"    if 5 in n: {end}\n"
        "    return [{'score': k, 'k': k} for k in n]\n",
        timeout_s=2.0 if "sleep" in end else 30.0,
    )

    verdicts = runner.score(rows(8))

    lost = {5} if "sleep" not in end else {4, 5, 6, 7}  # the time is over with the third call that hangs
    assert verdicts.values == [None if k in lost else float(k) for k in range(8)]
    assert [own.get("k") for own in verdicts.fields] == [None if k in lost else k for k in range(8)]
    assert verdicts.failure == "" and len(verdicts.notes) == 1
    assert verdicts.timed_out == ("sleep" in end)


def test_one_bad_row_of_a_verl_function_leaves_the_others_their_verdict(start: Start) -> None:
    runner = start(
        "import os, time\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'text 1': raise ValueError('odd')\n"
        "    if solution_str == 'text 2': return {'acc': 1}\n"
        "    if solution_str == 'text 3': os._exit(3)\n"
        "    if solution_str == 'text 4': time.sleep(60)\n"
        "    return 1\n",
        timeout_s=1.0,
    )

    verdicts = runner.score(rows(6, reward_model={"ground_truth": ""}))

    assert verdicts.values == [1.0, None, None, None, None, 1.0]
    assert verdicts.failure == ""
    told = "\n".join(verdicts.notes)
    for word in ("odd", "without 'score'", "exit 3", "1 s"):
        assert word in told


def test_time_outs_of_a_verl_function_are_bounded_per_claim(start: Start) -> None:
    runner = start(
        "import time\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(0 if solution_str == 'text 0' else 60)\n"
        "    return 1.0\n",
        timeout_s=0.3,
    )

    verdicts = runner.score(rows(64, reward_model={"ground_truth": ""}))

    assert verdicts.values == [1.0] + [None] * 63
    assert "rows 4 and on were not scored" in verdicts.notes[-1]


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def f(completions, n, **_):\n    await asyncio.sleep(0.01)\n    return n\n",
        "import asyncio\nasync def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    await asyncio.sleep(0.01)\n    return int(solution_str[-1])\n",
        "import asyncio\nasync def g(n):\n    return n\ndef f(completions, n, **_):\n    return g(n)\n",
    ],
    ids=["trl", "verl", "coroutine"],
)
def test_async_functions_are_awaited(start: Start, source: str) -> None:
    assert start(source).score(rows(3, reward_model={"ground_truth": ""})).values == [0.0, 1.0, 2.0]


def test_callable_objects_and_lambdas_are_functions_too(start: Start) -> None:
    runner = start("class F:\n    def __call__(self, prompts, completions, **c): return c['n']\nf = F()\n")

    assert runner.score(rows(2)).values == [0.0, 1.0]


def test_arguments_of_the_recipe_are_passed_on(start: Start) -> None:
    runner = start("def f(completions, *, low, high=3, **_):\n    return [low + high] * len(completions)\n", low=2)

    assert runner.score(rows(2)).values == [5.0, 5.0]


def test_arguments_that_the_function_does_not_take_are_refused_at_start(start: Start) -> None:
    with pytest.raises(UsageError, match=r"arguments.*got lwo, expected one of its parameters"):
        start("def f(completions, low=1):\n    return [1.0]\n", lwo=2)


def test_a_function_may_import_its_neighbour(start: Start, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    runner = start("from neighbour import VALUE\ndef f(completions, **_):\n    return [VALUE] * len(completions)\n")

    assert runner.score(rows(1)).values == [7.0]


# Values (case D5: the reward's number type must not decide the advantage)

BF16 = "import torch\ndef f(completions, **_): return torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16)\n"


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("[True, False, False, False]", [1.0, 0.0, 0.0, 0.0]),
        ("[1, 0, 0, 0]", [1.0, 0.0, 0.0, 0.0]),
        ("(0.1, 0.2, 0.3, 0.4)", [0.1, 0.2, 0.3, 0.4]),
        ("[np.float32(0.1)] * 4", [0.10000000149011612] * 4),
        ("[np.float16(0.1)] * 4", [0.0999755859375] * 4),
        ("[np.bool_(True), np.int64(2), np.uint8(3), np.longdouble(4)]", [1.0, 2.0, 3.0, 4.0]),
        ("[np.array(0.5)] * 4", [0.5] * 4),
        ("np.array([1, 2, 3, 4], dtype=np.int8)", [1.0, 2.0, 3.0, 4.0]),
        (
            "np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32)",
            [0.10000000149011612, 0.20000000298023224, 0.30000001192092896, 0.4000000059604645],
        ),
        ("(x / 2 for x in range(4))", [0.0, 0.5, 1.0, 1.5]),
        ("map(float, range(4))", [0.0, 1.0, 2.0, 3.0]),
        ("range(4)", [0.0, 1.0, 2.0, 3.0]),
        ("[None, 1, None, 2]", [None, 1.0, None, 2.0]),
        ("[Decimal('0.5'), Fraction(1, 4), 1, 0.0]", [0.5, 0.25, 1.0, 0.0]),
        ("[{'score': 0.5, 'extra': 'x'}, {'score': None}, 1, 2]", [0.5, None, 1.0, 2.0]),
        ("[2**53, -0.0, 5e-324, 1e308]", [2.0**53, -0.0, 5e-324, 1e308]),
    ],
)
def test_numbers_of_every_type_become_exact_float64(start: Start, returned: str, expected: list[Any]) -> None:
    runner = start(
        "import numpy as np\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        f"def f(completions, **_): return {returned}\n"
    )

    verdicts = runner.score(rows(4))

    assert verdicts.failure == ""
    assert verdicts.values == expected
    assert all(type(value) in (float, type(None)) for value in verdicts.values)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16)", [1.0, 1.0, 1.0, 1.0078125]),
        (
            "[torch.tensor(x, dtype=torch.bfloat16, requires_grad=True) for x in (1, 1, 1, 1.0078125)]",
            [1.0, 1.0, 1.0, 1.0078125],
        ),
        ("torch.tensor([True, False, True, False])", [1.0, 0.0, 1.0, 0.0]),
        ("torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)", [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_tensors_become_exact_float64(start: Start, returned: str, expected: list[float]) -> None:
    runner = start(f"import torch\ndef f(completions, **_): return {returned}\n", timeout_s=60.0)

    verdicts = runner.score(rows(4))

    assert (verdicts.failure, verdicts.values) == ("", expected)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ("np.float64(1.0)", "got 1 (a numpy.float64"),
        ("1.0", "got 1 (a float: 1.0)"),
        ("True", "got 1 (a bool: True)"),
        ("np.array(1.0)", "got 1 (a numpy.ndarray"),
        ("None", "got 1 (a NoneType: None)"),
        ("'1.0'", "got 1 (a str: '1.0')"),
        ("'1234'", "got 1 (a str: '1234')"),
        ("{'score': 1.0}", "got 1 (a dict"),
        ("{1.0, 2.0, 3.0, 4.0}", "got 1 (a set"),
        ("object()", "got 1 (a object"),
        ("[1.0]", "got 1"),
        ("[]", "got 0"),
        ("[1.0] * 5", "got 5"),
        ("np.ones(1)", "got 1"),
        ("(1.0 for _ in range(1))", "got 1"),
        ("itertools.count()", "got more than 4"),
    ],
)
def test_a_lone_value_or_a_wrong_length_is_no_verdict_and_never_spread(
    start: Start, returned: str, got: str
) -> None:
    runner = start(f"import itertools\nimport numpy as np\ndef f(completions, **_): return {returned}\n")

    verdicts = runner.score(rows(4))

    assert verdicts.values == [None] * 4
    assert f"rewards.py:f: expected 4 values, {got}" in verdicts.failure


def test_a_lone_value_for_a_single_row_is_refused_as_well(start: Start) -> None:
    verdicts = start("def f(completions, **_): return 1.0\n").score(rows(1))

    assert verdicts.values == [None]
    assert "expected 1 values, got 1 (a float: 1.0)" in verdicts.failure


@pytest.mark.parametrize(
    ("item", "got"),
    [
        ("'1.0'", "a str"),
        ("b'1'", "a bytes"),
        ("[1.0]", "a list"),
        ("{'acc': 1}", "a dict without 'score' (keys: 'acc')"),
        ("{}", "a dict without 'score' (keys: none)"),
        ("{'score': 'high'}", "a str"),
        ("1j", "a complex"),
        ("np.complex64(1)", "a complex"),
        ("np.ones(1)", "a numpy.ndarray of shape (1,)"),
        ("object()", "a object"),
        ("10**400", "a int that is no float64"),
    ],
)
def test_a_value_that_is_no_number_is_named_with_its_row(start: Start, item: str, got: str) -> None:
    runner = start(f"import numpy as np\ndef f(completions, **_): return [1.0, 1.0, {item}, 1.0]\n")

    verdicts = runner.score(rows(4))

    assert verdicts.values == [None] * 4
    assert f"rewards.py:f: row 2: expected a number or None, got {got}" in verdicts.failure


def test_nan_and_infinities_are_no_verdict_for_their_row_only(start: Start) -> None:
    runner = start("def f(completions, **_): return [1.0, float('nan'), float('inf'), -float('inf')]\n")

    verdicts = runner.score(rows(4))

    assert verdicts.values == [1.0, None, None, None]
    assert verdicts.failure == ""
    assert [note.rsplit(" ", 1)[1] for note in verdicts.notes] == ["nan", "inf", "-inf"]


def test_advantages_do_not_depend_on_the_type_of_the_rewards(start: Start) -> None:
    """In bfloat16 the group's mean would round to 1, and the advantages come out as 0, 0, 0, 2."""
    rewards = np.array(start(BF16, timeout_s=60.0).score(rows(4)).values)
    recipe = Recipe.model_validate(
        {
            "run": {"name": "t"},
            "model": "./m",
            "data": {"train": "t.jsonl"},
            "reward": ({"function": "r.py:f"},),
            "train": {"steps": 1},
            "algorithm": {"std_epsilon": 1e-6},
        }
    )

    found = algorithm_of(recipe).advantages(ScoredBatch(rewards, ["g"] * 4, [np.ones(3, dtype=np.bool_)] * 4))

    assert found == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-3)


# Functions that misbehave


def test_a_function_that_raises_has_no_verdict_and_names_its_line(start: Start, capfd: Any) -> None:
    runner = start("def f(completions, **_):\n    return [1 / 0 for _ in completions]\n")

    first, second = runner.score(rows(2)), runner.score(rows(2))

    assert first.values == [None, None]
    for word in ("rewards.py:f", "ZeroDivisionError", "rewards.py:2", "division by zero"):
        assert word in first.failure
    assert second.failure == first.failure
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize("statement", ["sys.exit(3)", "raise SystemExit", "raise asyncio.CancelledError"])
def test_a_function_that_asks_to_exit_has_no_verdict(start: Start, statement: str) -> None:
    runner = start(f"import sys, asyncio\ndef f(completions, **_):\n    {statement}\n")

    verdicts = runner.score(rows(1))

    assert verdicts.values == [None]
    assert "rewards.py:f" in verdicts.failure


def test_a_hanging_function_is_ended_and_the_next_call_works(start: Start, tmp_path: Path) -> None:
    runner = start(
        "import os, pathlib, time\n"
        "def f(completions, n, **_):\n"
        "    if n[0] == 0:\n"
        f"        pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "        time.sleep(600)\n"
        "    return n\n",
        timeout_s=1.0,
    )

    began = time.monotonic()
    hung = runner.score(rows(2))
    took_s = time.monotonic() - began
    hung_pid = int((tmp_path / "pid").read_text())
    after = runner.score([RewardRow("p", "c", {"n": 5})])

    assert hung.values == [None, 1.0]  # a row that hangs takes no other row's verdict
    assert [note.split(",")[0] for note in hung.notes] == ["rewards.py:f: no answer within 1 s"]
    assert took_s < 60  # of the 600 that it would have slept
    assert not alive(hung_pid)
    assert after.values == [5.0]


@pytest.mark.parametrize("apart", ["", ", process_group=0", ", start_new_session=True"])
def test_a_function_that_ignores_signals_is_ended_with_its_children(
    start: Start, tmp_path: Path, apart: str
) -> None:
    runner = start(
        "import signal, subprocess, pathlib, time\n"
        "def f(completions, **_):\n"
        "    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\n"
        f"    child = subprocess.Popen(['sleep', '600']{apart})\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "    while True: pass\n",
        timeout_s=2.0,
    )

    verdicts = runner.score(rows(1))

    assert "no answer" in verdicts.failure
    grandchild = int((tmp_path / "pid").read_text())
    assert until(lambda: not alive(grandchild))


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("os._exit(7)", "exit 7"),
        ("os._exit(0)", "exit 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9 (SIGKILL)"),
        ("ctypes.string_at(0)", "signal 11 (SIGSEGV)"),
        ("(os.fork() and os._exit(7)) or time.sleep(3)", "exit 7"),
    ],
)
def test_a_crashing_function_has_no_verdict_and_the_next_call_works(
    start: Start, statement: str, words: str
) -> None:
    runner = start(
        "import ctypes, os, signal, time\n"
        f"def f(completions, n, **_):\n    if n[0] == 0: {statement}\n    return n\n"
    )

    crashed = runner.score(rows(2))
    after = runner.score([RewardRow("p", "c", {"n": 5})])

    assert crashed.values == [None, 1.0]
    assert f"rewards.py:f: its process ended with {words}" in crashed.notes[0]
    assert after.values == [5.0]


def test_prints_do_not_disturb_the_conversation(start: Start, capfd: Any) -> None:
    runner = start(
        "import os, subprocess, sys\n"
        "print('at import')\n"
        "def f(completions, **_):\n"
        "    print('x' * 100_000)\n"
        "    os.write(1, b'raw')\n"
        "    subprocess.run(['echo', 'from a child'], check=True)\n"
        "    assert sys.stdin.read() == ''\n"
        "    return [1.0] * len(completions)\n"
    )

    verdicts = runner.score(rows(3))

    captured = capfd.readouterr()
    assert (verdicts.failure, verdicts.values) == ("", [1.0] * 3)
    assert captured.out == ""
    for text in ("at import", "x" * 100, "raw", "from a child"):
        assert text in captured.err


def test_large_rows_and_many_of_them_pass(start: Start) -> None:
    runner = start("def f(completions, **_): return [len(c) for c in completions]\n")

    verdicts = runner.score([RewardRow("p" * 10_000, "c" * 10_000, {})] * 500)

    assert verdicts.values == [10_000.0] * 500


def test_no_rows_need_no_call(start: Start) -> None:
    assert start("def f(completions, **_): raise ValueError\n").score([]).values == []


def test_a_wait_is_told_while_the_function_works(start: Start) -> None:
    told: list[float] = []
    runner = start(
        "import time\ndef f(completions, **_):\n    time.sleep(2.5)\n    return [1.0]\n",
        while_waiting=lambda: told.append(time.monotonic()),
    )

    before = len(told)
    assert runner.score(rows(1)).values == [1.0]
    assert len(told) - before >= 2


def test_an_answer_of_an_abandoned_call_is_not_taken_for_the_next_one(start: Start) -> None:
    fail = [False]

    def waiting() -> None:
        if fail[0]:
            raise RuntimeError("the lease is gone")

    runner = start(
        "import time\ndef f(completions, n, **_):\n    time.sleep(2 if n[0] == 0 else 0)\n    return n\n",
        while_waiting=waiting,
    )

    fail[0] = True
    with pytest.raises(RuntimeError):
        runner.score(rows(2))
    fail[0] = False

    assert runner.score([RewardRow("p", "c", {"n": 9})]).values == [9.0]


# Starting and ending


@pytest.mark.parametrize(
    ("source", "function", "words"),
    [
        ("def f(completions, **_): ...\n", "rewards.py:g", ["rewards.py:g", "rewards.py:f"]),
        ("def f(completions, **_): ...\n", "reward.py:f", ["reward.py", "rewards.py"]),
        ("def f(completions, **_): ...\n", "rewards.py", ["file.py:function"]),
        ("f = 3\n", "rewards.py:f", ["a int named 'f'"]),
        ("import does_not_exist_anywhere\n", "rewards.py:f", ["ModuleNotFoundError", "rewards.py:1"]),
        ("def f(:\n", "rewards.py:f", ["SyntaxError", "rewards.py:1"]),
        ("raise SystemExit(3)\n", "rewards.py:f", ["SystemExit", "rewards.py:1"]),
        ("import os\nos._exit(3)\n", "rewards.py:f", ["rewards.py:f", "exit 3"]),
        ("def f(a, b): ...\n", "rewards.py:f", ["(a, b)", "prompts, completions", "compute_score"]),
        ("def f(): ...\n", "rewards.py:f", ["prompts, completions"]),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_start(
    start: Start, source: str, function: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        start(source, function=function)

    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "def f(completions, **_): return [1.0]\n"
    )
    program = (
        "import os, pathlib, signal\n"
        "from rlmq.common.recipe.reward_block import RewardBlock\n"
        "from rlmq.producers.process_runner import ProcessRewardRunner\n"
        f"ProcessRewardRunner(RewardBlock(function='rewards.py:f'), 'f', pathlib.Path({str(tmp_path)!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)

    child = int((tmp_path / "pid").read_text())
    assert until(lambda: not alive(child))


def test_close_ends_the_child(start: Start, tmp_path: Path) -> None:
    runner = start(
        f"import os, pathlib\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "def f(completions, **_): return [1.0]\n"
    )
    child = int((tmp_path / "pid").read_text())
    assert alive(child)

    runner.close()

    assert not alive(child)


def test_the_child_itself_needs_little_memory(start: Start) -> None:
    runner = start(
        "import sys\n"
        "def f(completions, **_):\n"
        "    assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "    kib = next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('VmRSS'))\n"
        "    return [kib]\n"
    )

    (kib,) = runner.score(rows(1)).values

    assert kib is not None
    assert kib < 60 * 1024
