"""`file.py:function`: found by path, imported like a script, errors told in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmq.common.errors import UsageError
from rlmq.common.user_code import find_beside, is_spec, load_function, source_hash, split_spec


def test_imports_a_function_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(x):\n    return x + 1\n")
    assert load_function("r.py:score", tmp_path, subject="reward.0.function")(1) == 2


def test_finds_functions_by_absolute_path_and_in_odd_folders(tmp_path: Path) -> None:
    folder = tmp_path / "ä b'%"
    folder.mkdir()
    (folder / "r.py").write_text("score = lambda: 'odd'\n")
    assert load_function(f"{folder}/r.py:score", Path("/nowhere"), subject="s")() == "odd"
    assert load_function("ä b'%/r.py:score", tmp_path, subject="s")() == "odd"


def test_siblings_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "sibling_of_r.py").write_text("value = 5\n")
    (tmp_path / "r.py").write_text("import sibling_of_r\n\ndef score():\n    return sibling_of_r.value\n")
    assert load_function("r.py:score", tmp_path, subject="s")() == 5


def test_same_file_name_in_two_folders_is_two_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "r.py").write_text(f"def score():\n    return {name!r}\n")
    found = [load_function("r.py:score", tmp_path / name, subject="s")() for name in ("a", "b")]
    assert found == ["a", "b"]


def test_an_edited_file_of_equal_size_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def score():\n    return 1\n")
    first, before = load_function("r.py:score", tmp_path, subject="s")(), source_hash("r.py:score", tmp_path)
    file.write_text("def score():\n    return 2\n")
    assert (first, load_function("r.py:score", tmp_path, subject="s")()) == (1, 2)
    assert source_hash("r.py:score", tmp_path) != before


def test_a_file_is_imported_once_and_leaves_no_bytecode(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "from pathlib import Path\nf = Path(__file__).with_name('count')\n"
        "f.write_text((f.read_text() if f.exists() else '') + 'x')\n"
        "def a(): pass\ndef b(): pass\n"
    )
    load_function("r.py:a", tmp_path, subject="s")
    load_function("r.py:b", tmp_path, subject="s")
    assert (tmp_path / "count").read_text() == "x"
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("source", "place", "text"),
    [
        ("import os\n\n1 / 0\n", "r.py:3", "division by zero"),
        ("x = 1\ndef f(:\n", "r.py:2", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "r.py:2", "SystemExit"),
        ("import nowhere_to_be_found\n", "r.py:1", "nowhere_to_be_found"),
        ("import broken_sibling\n", "broken_sibling.py:2", "boom"),
    ],
)
def test_errors_at_import_are_one_message_with_the_line(tmp_path: Path, source: str, place: str, text: str) -> None:
    (tmp_path / "r.py").write_text(source)
    (tmp_path / "broken_sibling.py").write_text("\nraise RuntimeError('boom')\n")
    with pytest.raises(UsageError) as caught:
        load_function("r.py:f", tmp_path, subject="reward.0.function")
    message = str(caught.value)
    assert message.startswith("reward.0.function: ") and place in message and text in message
    assert "Traceback" not in message and "\n" not in message


def test_a_missing_function_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("from json import loads\n\ndef score(): pass\n")
    with pytest.raises(UsageError, match=r"no function 'scor' in r\.py, expected one of score\. .*r\.py:score"):
        load_function("r.py:scor", tmp_path, subject="s")


def test_a_name_that_is_no_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("score = 3\n")
    with pytest.raises(UsageError, match="int named 'score', expected a function"):
        load_function("r.py:score", tmp_path, subject="s")


def test_a_missing_file_names_the_place_tried_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("")
    with pytest.raises(UsageError) as caught:
        find_beside("reward.py", tmp_path, subject="s")
    assert str(tmp_path / "reward.py") in str(caught.value) and "'rewards.py'" in str(caught.value)


@pytest.mark.parametrize("spec", ["r.py", "r.py:", ":f", "r/x.txt:f", "r.py:not a name", "", "module.function"])
def test_other_forms_are_refused(spec: str) -> None:
    assert not is_spec(spec)
    with pytest.raises(UsageError, match=r"expected file\.py:function"):
        split_spec(spec, subject="s")


def test_a_function_of_an_installed_module_is_named_by_dots() -> None:
    assert load_function("json.encoder:JSONEncoder", Path("/nowhere"), subject="s") is json.JSONEncoder
    assert source_hash("json.encoder:JSONEncoder", Path("/nowhere"))
    with pytest.raises(UsageError, match=r"s: got no module json\.missing"):
        load_function("json.missing:f", Path("/nowhere"), subject="s")
    with pytest.raises(UsageError, match="Did you mean"):
        load_function("json.encoder:JSONEncode", Path("/nowhere"), subject="s")
