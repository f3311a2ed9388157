"""The page docs/experience-lab.md: its commands are run, and what it says of them is looked at."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.timeout(400)

PAGE = Path(__file__).parents[2] / "docs" / "experience-lab.md"
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
COMMANDS = [line.removeprefix("$ rlmq ") for block in BLOCKS for line in block.splitlines()]


@pytest.fixture(scope="module")
def walked(module_cli: Any) -> dict[str, str]:
    """What each command of the page printed; all ended well."""
    (module_cli.folder / "recipes").symlink_to(module_cli.root / "recipes")
    said = {}
    for command in COMMANDS:
        done = module_cli.run(*shlex.split(command))
        assert done.code == 0, f"{command}\n{done.text}"
        said[command] = done.out
    return said


def of(walked: dict[str, str], *words: str) -> str:
    [found] = [out for command, out in walked.items() if all(word in command for word in words)]
    return found


def test_a_replay_is_the_run_to_the_bit(walked: dict[str, str]) -> None:
    whole = walked["replay lab"]
    assert "steps 1 to 8, from the first model" in whole
    assert "steps equal to the run's, bit for bit: 8" in whole
    one = walked["replay lab --step 7"]
    assert "steps 7 to 7, from checkpoint 6" in one
    assert next(line for line in whole.splitlines() if line.startswith("step 7")) in one


def test_another_method_is_shown_beside_the_runs_own(walked: dict[str, str]) -> None:
    for words in (("gspo",), ("tiny_task.py:liked",), ("grad_clip=0.1",)):
        said = of(walked, "replay", *words)
        assert "cosine of the gradients" in said
        cosine = float(re.findall(r"cosine of the gradients\W+([-\d.e]+)", said)[0])
        assert 0.2 < cosine < 1.000001
    rewards = re.findall(r"reward_mean\W+([\d.]+)\W+([\d.]+)", of(walked, "liked"))[0]
    assert float(rewards[1]) > float(rewards[0])


def test_sql_tells_why_the_reward_fell(walked: dict[str, str]) -> None:
    by_step = dict(re.findall(r"│ (\d) +│ ([\d.]+) +│ 64", of(walked, "sql", "group by step")))
    assert float(by_step["6"]) < float(by_step["5"])
    by_source = {
        (s, k): float(r) for s, k, r in re.findall(r"│ (\d) +│ (\w+) +│ ([\d.]+)", of(walked, "group by all"))
    }
    assert by_source["6", "letters"] > by_source["5", "letters"]
    assert by_source["6", "digits"] < 0.1
    assert "mean_now" in of(walked, "rescore")


def test_show_follows_a_sample_to_its_step(walked: dict[str, str]) -> None:
    said = of(walked, "show")
    for words in ("prompts-0", "rollout-0", "version 5", "reward-0", "functions", "actor-0", "call 6/", "seed 7"):
        assert words in said
    assert re.search(r"step 6: row \d+ of 64, which made version 6\n +update 1, rank 0, micro-batch", said)


def test_offline_in_the_live_order_ends_with_the_live_weights(walked: dict[str, str], module_cli: Any) -> None:
    assert "steps 1 to 8 are the same to the bit" in of(walked, "diff")
    live, again = (
        (module_cli.folder / "runs" / name / "checkpoints" / "step-000008" / "model.safetensors").read_bytes()
        for name in ("lab-1", "lab-offline-1")
    )
    assert live == again
    logs = {path.name for path in (module_cli.folder / "runs" / "lab-offline-1" / "logs").glob("*-0.log")}
    assert not {"rollout-0.log", "reward-0.log"} & logs


def test_recordings_are_mixed_by_weight_and_the_ratio_is_to_who_wrote_the_rows(
    walked: dict[str, str], module_cli: Any
) -> None:
    lines = module_cli.metrics("mixed")
    assert [line["samples"] for line in lines] == [32, 32]
    [files] = [list((module_cli.newest_run("mixed") / "samples").glob("train-000001-*.parquet"))]
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    sources = [row["source"] for row in rows]
    assert (sources.count("r1"), sources.count("r2")) == (24, 8)
    # the first model's probability over that of the policy that wrote the token, as the loss told its mean
    assert {version for row in rows for version in row["policy_versions"]} - {0}
    assert lines[0]["ratio"] != pytest.approx(1.0, abs=1e-3)
    assert lines[0]["ratio_max"] > 1.01


def test_the_report_has_pictures_and_samples(walked: dict[str, str], module_cli: Any) -> None:
    page = (module_cli.folder / "runs" / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") >= 4
    assert "train-000008-" in page


def test_a_flipped_token_is_found_by_name(walked: dict[str, str], module_cli: Any) -> None:
    samples = module_cli.folder / "runs" / "lab-1" / "samples"
    [path] = samples.glob("train-000008-*.parquet")
    kept = path.read_bytes()
    rows = pq.read_table(path)
    tokens = rows["response_ids"].to_pylist()
    longest = max(range(len(tokens)), key=lambda index: len(tokens[index]))
    tokens[longest][0] ^= 1
    place = rows.schema.get_field_index("response_ids")
    pq.write_table(
        rows.set_column(place, rows.schema.field(place), pa.array(tokens, rows.schema.field(place).type)), path
    )
    try:
        done = module_cli.run("replay", "lab", "--step", "8", "--json")
    finally:
        path.write_bytes(kept)
    [*_, line] = map(json.loads, done.out.splitlines())
    assert done.code == 6
    assert line["verdict"].startswith("gradient of model.")
    assert pc.all(pc.is_valid(rows["lineage"])).as_py()
