"""Where controller and workers meet: sockets of this machine, or TCP, with CURVE keys or without."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlmq.common.curve import Keys
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
        """The endpoints that a recipe's `control` asks for."""
        control = control or ControlBlock()
        keys = Keys(Path(os.path.expandvars(control.keys)).expanduser()) if control.keys is not None else None
        if control.address is None:
            return cls(run.doorbell_address, run.reports_address, keys)
        host, port = control.place
        return cls(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}", keys)

    @property
    def remote(self) -> bool:
        """Whether they are TCP."""
        return self.doorbell.startswith("tcp://")
