"""Renders a deployment: file name to text. The same recipe gives the same files, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2

from rlmq.common.curve import CONTROLLER, OPERATOR
from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import LoadedRecipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.commands import COMPUTE_ROLES
from rlmq.deploying.site import site_of

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("rlmq.deploying"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)


_HOME, _STATE, _REDIS = PurePosixPath("/opt/rlmq"), PurePosixPath("/var/lib/rlmq"), "/run/rlmq-redis/redis.sock"


def systemd(loaded: LoadedRecipe) -> dict[str, str]:
    """Units for one machine: a target, Redis, the controller, a template for workers and what each alone gets."""
    remote = loaded.recipe.control.address is not None
    given = _given(loaded, ("control.keys=${CREDENTIALS_DIRECTORY}",) if remote else ())
    site = given["site"]
    given |= {
        "program": site.home / ".venv" / "bin" / "rlmq",
        "words": "".join(f" {word}" for word in site.overrides),
        "redis": PurePosixPath("/usr/bin/redis-server"),
        "allowed": [CONTROLLER, *site.roles, OPERATOR],
    }
    names = ("rlmq.target", "rlmq-redis.service", "rlmq-controller.service", "rlmq@.service", "README.md")
    files = _files("systemd", names, given)
    for worker in site.workers:
        own = _rendered("systemd/instance.conf.j2", given | {"worker": worker})
        files[f"rlmq@{worker.name}.service.d/10-{worker.role}.conf"] = own
    return files


def compose(loaded: LoadedRecipe) -> dict[str, str]:
    """Containers of one machine: a Compose file, a Dockerfile, the configurations of Redis and Prometheus.

    Raises:
        UsageError: control over TCP: the containers share one network, and sockets.
    """
    if loaded.recipe.control.address is not None:
        raise UsageError(
            "control.address",
            got=loaded.recipe.control.address,
            expected="none: the containers of one machine use sockets",
            remedy="Leave it out of the recipe",
        )
    given = _given(loaded)
    words = "".join(f", {json.dumps(word)}" for word in given["site"].overrides)
    given |= {"words": words, "metrics": RunFolder(Path("run")).metrics_addresses.name}
    return _files("compose", ("compose.yaml", "Dockerfile", "prometheus.yml", "README.md"), given)


def _given(loaded: LoadedRecipe, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    site = site_of(loaded, home=_HOME, state=_STATE, user="rlmq", redis_url=f"unix://{_REDIS}", overrides=overrides)
    return {"site": site, "compute": (*COMPUTE_ROLES, *(one.name for one in loaded.recipe.critics))}


def _files(kind: str, names: Sequence[str], given: dict[str, Any]) -> dict[str, str]:
    files = {name: _rendered(f"{kind}/{name}.j2", given) for name in names}
    return files | {"redis.conf": _rendered("redis.conf.j2", given)}


def _rendered(template: str, given: dict[str, Any]) -> str:
    return _TEMPLATES.get_template(template).render(given)


KINDS: Mapping[str, Callable[[LoadedRecipe], dict[str, str]]] = {"systemd": systemd, "compose": compose}
"""What `rlmq deploy` knows."""
