"""Users of a run's own server: the run's processes, limited to its keys and functions, and an administrator.

Their passwords are random and lie in the run folder, in a file of mode 600. The server takes no user without one.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from rlmq.buffer.acl import acl_rules
from rlmq.common.private_files import write_private
from rlmq.common.run_folder import RunFolder

RUN_USER = "rlmq"
FILE = "users.acl"  # in the server's folder
_LOOKS = ("+scan", "+strlen")  # `rlmq buffer --verify`, of a server that holds this run alone
_PASSWORD = re.compile(r"^user (\w+) on >([0-9a-f]{32,}) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerUsers:
    """Passwords of the two."""

    run: str
    administrator: str

    @classmethod
    def of(cls, run: RunFolder) -> ServerUsers:
        """The users of a run's server; made with the first start, kept from then on.

        Raises:
            OSError: the run folder cannot be written.
        """
        run.server.mkdir(parents=True, exist_ok=True)
        path = run.server / FILE
        known = dict(_PASSWORD.findall(path.read_text())) if path.is_file() else {}
        users = cls(known.get(RUN_USER) or secrets.token_hex(32), known.get("default") or secrets.token_hex(32))
        rules = " ".join([*acl_rules(run.run_id), "+function|load", "+ping", *_LOOKS])
        lines = f"user default on >{users.administrator} ~* &* +@all\nuser {RUN_USER} on >{users.run} {rules}\n"
        write_private(path, lines.encode())
        return users
