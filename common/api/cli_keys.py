"""`rlmq keys`: the CURVE keys of a control plane, and where each file goes."""

from __future__ import annotations

from pathlib import Path

from rlmq.common.curve import CONTROLLER, OPERATOR, Keys
from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.compose import ROLES


def keys_command(folder: Path, role: str | None, recipe: Path | None) -> int:
    """`rlmq keys`. Without a role it makes the pairs that are missing; with one it makes that pair anew."""
    loaded = None if recipe is None else load_recipe(recipe).recipe
    own = () if loaded is None else (*(one.name for one in loaded.nodes), *(one.name for one in loaded.critics))
    names = (CONTROLLER, *ROLES, *own, OPERATOR)
    if role is not None and role not in names:
        raise UsageError("--role", got=repr(role), expected=f"one of {', '.join(names)}")
    keys = Keys(folder.absolute())
    made = [name for name in names if role in (None, name) and keys.make(name, anew=role is not None)]
    print(f"{keys.folder}: {'made ' + ', '.join(made) if made else 'all keys are there'}")
    print(f"  machine of the controller: {CONTROLLER}.key and every .pub (the allow-list)")
    print(f"  machine of a worker: {CONTROLLER}.pub and ROLE.key of each of its roles")
    print(f"  machine of an operator: {CONTROLLER}.pub and {OPERATOR}.key")
    print("  files of mode 600 in a folder of mode 700, named by control.keys; or systemd's LoadCredential=")
    if made == [CONTROLLER]:
        print(
            f"Copy {CONTROLLER}.pub to every machine; processes that run keep the old key until they start again."
        )
    elif role is not None:
        print(f"Copy {role}.pub to the controller's machine: the old key is refused at its next connection.")
    return 0
