"""Resolved recipes read back equal, hash by value, and the reference page is current."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.errors import UsageError
from rlmq.common.recipe import reference
from rlmq.common.recipe.load import code_hash, dump_recipe, load_recipe, recipe_hash
from rlmq.common.recipe.schema import Recipe

Read = Callable[..., Recipe]
PAGE = Path(__file__).parents[4] / "docs" / "recipe.md"

TEXT = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=20).filter(lambda t: t.strip() == t)
TRICKY = st.sampled_from(
    ["on", "1e-6", "010", "1:30", "null", "~", "true", "2026-01-01", "<<", "- a", "a: b", "#x", "="]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | TRICKY, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(arguments=st.dictionaries(TEXT | TRICKY, PLAIN, max_size=3), source=TEXT | TRICKY, lr=st.floats(0, 1e30))
def test_a_dumped_recipe_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, arguments: dict[str, object], source: str, lr: float
) -> None:
    recipe = Recipe.model_validate(
        {
            "run": {"name": "on"},
            "model": source,
            "data": {"train": source, "eval": {source: source}},
            "reward": ({"function": "r.py:f", "arguments": arguments},),
            "train": {"steps": 3, "lr": lr},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path).recipe == recipe


def test_a_dump_has_every_default(read: Read) -> None:
    dumped = yaml.safe_load(dump_recipe(read()))
    assert dumped["rollout"]["temperature"] == 1.0 and dumped["deadlines"]["sync_s"] == 120.0


def test_the_hash_follows_values_not_their_form(read: Read, base: str) -> None:
    assert recipe_hash(read(base)) == recipe_hash(read(base + "algorithm: {clip: [2e-1, 0.20]}\n"))
    assert recipe_hash(read(base)) != recipe_hash(read(None, "train.lr=2e-6"))


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == reference.markdown(), "python -m rlmq.common.recipe.reference > docs/recipe.md"


def test_every_key_has_a_sentence() -> None:
    assert [row.key for row in reference.describe_fields() if not row.sentence.endswith(".")] == []


def test_files_beside_a_link_come_first_and_those_beside_the_recipe_second(tmp_path: Path, base: str) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    for folder in (real, link):
        folder.mkdir()
    (real / "b.yaml").write_text(base)
    (real / "t.jsonl").touch()
    (real / "r.py").touch()
    (link / "r.py").touch()
    (link / "b.yaml").symlink_to(real / "b.yaml")
    loaded = load_recipe(link / "b.yaml")
    assert loaded.folder / loaded.recipe.reward[0].function == link / "r.py:score"
    assert loaded.folder / loaded.recipe.data.train == real / "t.jsonl"


def test_a_file_beside_neither_link_nor_recipe_names_both_places(tmp_path: Path, base: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "b.yaml").write_text(base)
    (tmp_path / "b.yaml").symlink_to(tmp_path / "real" / "b.yaml")
    with pytest.raises(UsageError) as caught:
        load_recipe(tmp_path / "b.yaml")
    message = str(caught.value)
    assert str(tmp_path / "t.jsonl") in message and str(tmp_path / "real" / "t.jsonl") in message


def test_a_linked_recipe_equals_the_recipe_when_all_files_lie_beside_it(tmp_path: Path, base: str) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "b.yaml").write_text(base)
    for name in ("t.jsonl", "r.py"):
        (real / name).touch()
    (tmp_path / "b.yaml").symlink_to("real/b.yaml")
    linked, direct = load_recipe(tmp_path / "b.yaml"), load_recipe(real / "b.yaml")
    assert (linked.recipe, linked.folder) == (direct.recipe, direct.folder)


def test_the_code_hash_follows_every_file_that_the_recipe_names(tmp_path: Path, base: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(base)
    loaded = load_recipe(recipe, ["reward=[{function: r.py:f}]", "data.train=t.py:rows"]).recipe
    seen = {code_hash(loaded, tmp_path)}
    for name in ("r.py", "t.py"):
        (tmp_path / name).write_text("a = 1")
        seen.add(code_hash(loaded, tmp_path))
        (tmp_path / name).write_text("a = 2")
        seen.add(code_hash(loaded, tmp_path))
    assert len(seen) == 5
