"""Reading, writing and hashing recipes.

Relative names in a recipe are looked up in the recipe's folder. When the recipe's path is a symbolic
link, the folder of the link comes first and that of the file behind it second.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlmq.common.errors import UsageError
from rlmq.common.recipe.convert import Problem, to_recipe
from rlmq.common.recipe.node_block import NodeBlock
from rlmq.common.recipe.schema import Recipe
from rlmq.common.recipe.yaml_tree import BlockNode, ListNode, Node, Scalar, parse_yaml
from rlmq.common.script import recipe_of_script
from rlmq.common.user_code import find_beside, is_file_spec, is_spec, source_hash

MOST_BYTES = 1 << 20
_CODE = ("function", "model", "role", "environment", "advantage", "loss", "loop", "optimizer", "strategy")
"""Keys of blocks whose values may name a file."""
# Names under which readers of verl's texts know a key, and the canonical ones.
ALIASES = {"dataflow.min_batch_for_reward": "stages.reward.min_batch"}


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A valid recipe and where it came from.

    `path` is as the user gave it, `folder` (absolute) is what relative names in `recipe` refer to, and
    `overrides` are the `a.b=1` already applied.
    """

    recipe: Recipe
    path: Path
    folder: Path
    overrides: tuple[str, ...] = ()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe and apply the overrides in order (of repeated ones the last wins).

    Raises:
        UsageError: the file cannot be read, is not YAML, has a key twice, or does not fit the schema: one
            message with every problem, its line, what was found and what was expected.
    """
    root = parse_yaml(_read(path), subject=str(path))
    if isinstance(root, Scalar) and root.is_null:
        root = BlockNode({}, root.where)
    if not isinstance(root, BlockNode):
        raise UsageError(str(path), got="no key: value lines", expected="a recipe, like recipes/demo.yaml")
    for override in overrides:
        _override(root, override)
    for alias, key in ALIASES.items():
        _resolve_alias(root, alias, key)
    recipe, problems = to_recipe(root)
    if recipe is None:
        raise _refusal(path, problems)
    folder = path.resolve().parent
    if path.is_symlink():
        recipe = _beside_link(recipe, path.parent.absolute(), folder)
    recipe = _with_key_folder(recipe, folder)
    return LoadedRecipe(recipe, path, folder, tuple(overrides))


def load_joined(recipe: Path, node: Path) -> tuple[Recipe, NodeBlock]:
    """The recipe of a run, and an item of `nodes` in a file of its own; the item's names of files become absolute.

    Raises:
        UsageError: as `load_recipe`.
    """
    root, item = (parse_yaml(_read(path), subject=str(path)) for path in (recipe, node))
    loaded, _ = to_recipe(root)
    if loaded is None or not isinstance(root, BlockNode):
        raise UsageError(str(recipe), got="what is no recipe", expected="the recipe of a run")
    root.items["nodes"] = ListNode([item], item.where)
    more, problems = to_recipe(root)
    if more is None:
        raise _refusal(node, problems)
    [block] = more.nodes
    folder = node.resolve().parent
    names = {key: getattr(block, key) for key in ("function", "model")}
    beside = {key: f"{folder / name}" for key, name in names.items() if name is not None and is_file_spec(name)}
    return loaded, block.model_copy(update=beside)


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults included; reading it again gives an equal recipe."""
    return yaml.dump(
        recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000
    )


def recipe_hash(recipe: Recipe) -> str:
    """16 hex digits of every value, defaults included."""
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_hash(recipe: Recipe, folder: Path) -> str:
    """16 hex digits of the user's files that the recipe names; one that is not on this machine counts as empty."""
    names: set[str] = set()

    def collect(name: str, _: str) -> str:
        names.add(name)
        return name

    _map_sources(recipe, collect)
    digests = [_content(name, folder) for name in sorted(names) if is_spec(name)]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _content(spec: str, folder: Path) -> str:
    try:
        return source_hash(spec, folder)
    except (UsageError, OSError):
        return ""


def _read(path: Path) -> str:
    find_beside(path.name, path.parent, subject=f"recipe {path}")
    if path.is_dir():
        raise UsageError(f"recipe {path}", got="a folder", expected="a YAML file")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"recipe {path}", got=f"{path.stat().st_size} bytes", expected=f"at most {MOST_BYTES}")
        return recipe_of_script(path) if path.suffix == ".py" else path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"recipe {path}", got=f"bytes that are no UTF-8 ({error.reason})", expected="YAML"
        ) from error
    except OSError as error:
        raise UsageError(f"recipe {path}", got=error.strerror, expected="a readable YAML file") from error


def _override(root: BlockNode, override: str) -> None:
    """Put the value of `a.b=1` in its place, making the blocks on the way."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    subject = f"override {override!r}"
    if not equals or not all(parts):
        raise UsageError(subject, got="no key=value", expected="for example train.lr=1e-6")
    node: Node = root
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        child: Node | None = _override_value(text.strip(), subject) if last else None
        node = _step_into(node, part, child, subject)


def _resolve_alias(root: BlockNode, alias: str, key: str) -> None:
    """Move a value from the key's other name to the canonical one.

    Raises:
        UsageError: it is given under both names.
    """
    block, name = alias.split(".")
    parent = root.items.get(block)
    if not isinstance(parent, BlockNode) or name not in parent.items:
        return
    value, where = parent.items.pop(name), parent.key_where.pop(name)
    if not parent.items:
        del root.items[block]
    node: Node = root
    *blocks, last = key.split(".")
    for part in blocks:
        node = _step_into(node, part, None, where)
    if isinstance(node, BlockNode) and last in node.items:
        raise UsageError(f"{alias} ({where})", got=f"also {key} ({node.key_where[last]})", expected="one of them")
    _step_into(node, last, value, where)


def _step_into(node: Node, part: str, child: Node | None, subject: str) -> Node:
    """Go down one key; set it when `child` is given, make a block when nothing is there."""
    if isinstance(node, BlockNode):
        old = node.items.get(part)
        if child is None and (old is None or (isinstance(old, Scalar) and old.is_null)):
            child = BlockNode({}, subject)
        if child is not None:
            node.items[part], node.key_where[part] = child, subject
        return node.items[part]
    if isinstance(node, ListNode):
        if not part.isdigit() or int(part) > len(node.items):
            raise UsageError(subject, got=part, expected=f"an index from 0 to {len(node.items)} (which appends)")
        if int(part) == len(node.items):
            node.items.append(child or BlockNode({}, subject))
        elif child is not None:
            node.items[int(part)] = child
        return node.items[int(part)]
    raise UsageError(
        subject, got=f"{part!r} below the value {node.text!r}", expected="a key inside a block or list"
    )


def _override_value(text: str, subject: str) -> Node:
    """Quotes, lists and blocks are YAML; everything else is one plain value, `#` and `: ` included."""
    if text[:1] not in ("[", "{", '"', "'"):
        return Scalar(text, plain=True, where=subject)
    return _placed(parse_yaml(text, subject=subject), subject)


def _placed(node: Node, where: str) -> Node:
    if isinstance(node, Scalar):
        return Scalar(node.text, node.plain, where)
    if isinstance(node, ListNode):
        return ListNode([_placed(item, where) for item in node.items], where)
    items = {key: _placed(item, where) for key, item in node.items.items()}
    return BlockNode(items, where, dict.fromkeys(items, where))


def _refusal(path: Path, problems: list[Problem]) -> UsageError:
    if len(problems) == 1:
        (one,) = problems
        where = f"{path} {one.where}" if one.where.startswith("line") else one.where
        subject = f"{one.key} ({where})" if one.key else where
        return UsageError(subject, got=one.got, expected=one.expected, remedy=one.remedy)
    lines = [
        str(UsageError(f"  {p.key or 'the recipe'} ({p.where})", got=p.got, expected=p.expected, remedy=p.remedy))
        for p in problems
    ]
    return UsageError("\n".join([f"{path} has {len(problems)} problems:", *lines]))


def _beside_link(recipe: Recipe, link_folder: Path, folder: Path) -> Recipe:
    """The recipe with absolute names for what lies beside the link; the rest stays relative to `folder`.

    Raises:
        UsageError: a file lies in neither folder; both places are named.
    """

    def place(name: str, subject: str) -> str:
        file, colon, function = name.rpartition(":") if is_file_spec(name) else (name, "", "")
        if (link_folder / file).exists():
            return f"{link_folder / file}{colon}{function}"
        names_a_file = bool(colon) or file.endswith((".jsonl", ".parquet"))
        if names_a_file and not (folder / file).exists():
            tried = f"{link_folder / file} (beside the link) or {folder / file} (beside the recipe)"
            raise UsageError(subject, got=f"{name!r}, which is not there", expected=f"a file at {tried}")
        return name

    return Recipe.model_validate(_map_sources(recipe, place))


def _with_key_folder(recipe: Recipe, folder: Path) -> Recipe:
    """`control.keys` as every process of this machine finds it; `~` and variables are each process's own."""
    control = recipe.control
    if control.keys is None or control.keys[0:1] in ("~", "$"):
        return recipe
    control = control.model_copy(update={"keys": str(folder / control.keys)})
    return recipe.model_copy(update={"control": control})


def _map_sources(recipe: Recipe, place: Callable[[str, str], str]) -> dict[str, Any]:
    """The recipe's values, with `place(name, dotted key)` put for each name of a file."""
    values = recipe.model_dump()
    values["model"] = place(recipe.model, "model")
    data = values["data"]
    for key in ("train", "eval"):
        sets = getattr(recipe.data, key)
        if isinstance(sets, str):
            data[key] = place(sets, f"data.{key}")
        elif sets is not None:
            data[key] = {name: place(source, f"data.{key}.{name}") for name, source in sets.items()}
    for i, loss in enumerate(values["losses"]):
        loss["data"] = place(loss["data"], f"losses.{i}.data")
        _place_code(loss["algorithm"], f"losses.{i}.algorithm", place)
    for block in ("rollout", "algorithm", "train"):
        _place_code(values[block], block, place)
    _place_code(values["placement"]["actor"], "placement.actor", place)
    for i, block in enumerate(values["reward"]):
        _place_code(block, f"reward.{i}", place)
    if recipe.reward_controller is not None:
        values["reward_controller"] = place(recipe.reward_controller, "reward_controller")
    for block in ("critic", "reward_model"):
        if values[block]["model"] is not None:
            values[block]["model"] = place(values[block]["model"], f"{block}.model")
    for i, critic in enumerate(values["critics"]):
        _place_code(critic, f"critics.{i}", place)
    for i, node in enumerate(values["nodes"]):
        _place_code(node, f"nodes.{i}", place)
        _place_code(node["scorer"] or {}, f"nodes.{i}.scorer", place)
    return values


def _place_code(block: dict[str, Any], where: str, place: Callable[[str, str], str]) -> None:
    for kind in _CODE:
        if block.get(kind) is not None:
            block[kind] = place(block[kind], f"{where}.{kind}")


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader would take for something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    looks_typed = Scalar(text, plain=True, where="").value() != text
    style = "'" if looks_typed else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
