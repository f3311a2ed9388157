"""Where controller and workers meet: sockets of this machine, or TCP, with CURVE keys or without."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from rlmq.common.curve import Keys
from rlmq.common.errors import UsageError
from rlmq.common.recipe.schema import ControlBlock
from rlmq.common.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Endpoints:
    """ZeroMQ endpoints of the controller's XPUB and ROUTER; over TCP the ROUTER's port is the next one."""

    doorbell: str
    reports: str
    keys: Keys | None = None

    @classmethod
    def of(cls, run: RunFolder, control: ControlBlock | None = None) -> Endpoints:
        """The endpoints that a recipe's `control` asks for.

        Raises:
            UsageError: an address that others reach, without keys; or a key folder that is not to be trusted.
        """
        control = control or ControlBlock()
        keys = Keys(Path(os.path.expandvars(control.keys)).expanduser()) if control.keys is not None else None
        if control.address is None:
            return cls(run.doorbell_address, run.reports_address, keys)
        host, port = split_address(control.address)
        if keys is None and not is_loopback(host):
            raise UsageError(
                "control.address",
                got=f"{control.address} without control.keys",
                expected="keys, where other machines reach the control plane",
                remedy="Make them with `rlmq keys FOLDER` and set control.keys, or listen on 127.0.0.1",
            )
        if not 0 < port < 65535:
            raise UsageError(
                "control.address", got=f"port {port}", expected="1 to 65534 (the next one is used too)"
            )
        return cls(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}", keys)

    @property
    def remote(self) -> bool:
        """Whether they are TCP."""
        return self.doorbell.startswith("tcp://")


def split_address(address: str) -> tuple[str, int]:
    """`tcp://HOST:PORT` as host and port; an IPv6 address keeps its brackets.

    Raises:
        UsageError: another form.
    """
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not colon or not host or not port.isdecimal():
        raise UsageError("control.address", got=repr(address), expected="tcp://HOST:PORT")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; a name is not looked up: all but `localhost` count as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
