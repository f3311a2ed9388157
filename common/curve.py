"""CURVE keys of the control plane: the files, whom a key speaks for, and the door that asks for one.

::

    FOLDER/controller.key  controller.pub     the controller's pair
    FOLDER/ROLE.key        ROLE.pub           one pair per role, and `operator` for the verbs

A `.key` file is the secret key, a `.pub` file the public one, both as 40 characters of Z85. The controller needs
`controller.key` and every `.pub`, which are its allow-list. Another machine needs `controller.pub` and the `.key`
of each role that it runs.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from rlmq.common.errors import DependencyError, UsageError
from rlmq.common.private_files import write_private

CONTROLLER = "controller"
OPERATOR = "operator"
_DOMAIN = b"rlmq"
_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Keys:
    """A folder of keys. Only its owner may look into it, the folder of systemd's credentials apart."""

    folder: Path

    def file(self, name: str) -> Path:
        """The secret key of a name."""
        return self.folder / f"{name}.key"

    def public_file(self, name: str) -> Path:
        """The public key of a name."""
        return self.folder / f"{name}.pub"

    def secret(self, name: str) -> bytes:
        """The secret key (Z85).

        Raises:
            DependencyError: it is missing, or not a key. UsageError: others can read it.
        """
        return self._read(self.file(name))

    def public(self, name: str) -> bytes:
        """The public key (Z85); raises as `secret`."""
        return self._read(self.public_file(name))

    def speakers(self) -> dict[bytes, str]:
        """The allow-list: public key (Z85) to the name that it speaks for; raises as `secret`."""
        self._check_folder()
        names = sorted(path.stem for path in self.folder.glob("*.pub"))
        return {self.public(name): name for name in names if name != CONTROLLER}

    def make(self, name: str, *, anew: bool = False) -> bool:
        """Make the pair of a name, unless it (or its public half) is there; returns whether it did.

        Raises:
            UsageError: others can look into the folder. DependencyError: it cannot be written.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder()
            there = self.file(name).exists()
            if not anew and not there and self.public_file(name).exists():
                self.public(name)
                return False
            secret = self.secret(name) if there and not anew else zmq.curve_keypair()[1]
            write_private(self.file(name), secret + b"\n")
            write_private(self.public_file(name), zmq.curve_public(secret) + b"\n")
        except OSError as error:
            raise DependencyError(
                f"key folder {self.folder}", got=str(error), expected="a place for keys"
            ) from error
        return anew or not there

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make this socket the controller's: before it binds."""
        socket.curve_server = 1
        socket.curve_secretkey = self.secret(CONTROLLER)
        socket.zap_domain = _DOMAIN

    def knock(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Make this socket one of a role (or of an operator): before it connects."""
        secret = self.secret(name)
        socket.curve_serverkey = self.public(CONTROLLER)
        socket.curve_secretkey = secret
        socket.curve_publickey = zmq.curve_public(secret)

    def _read(self, path: Path) -> bytes:
        self._check_folder()
        try:
            self._refuse_open(path, path.stat())
            key = path.read_bytes().strip()
            z85.decode(key)
        except (OSError, ValueError, KeyError) as error:
            got = error.strerror if isinstance(error, OSError) else "something that is no key"
            raise DependencyError(f"key {path}", got=got, expected="a key of `rlmq keys`") from error
        if len(key) != _KEY_CHARACTERS:
            raise DependencyError(f"key {path}", got=f"{len(key)} characters", expected=f"{_KEY_CHARACTERS} of Z85")
        return key

    def _check_folder(self) -> None:
        try:
            self._refuse_open(self.folder, self.folder.stat())
        except OSError as error:
            raise DependencyError(
                f"key folder {self.folder}",
                got=error.strerror,
                expected="a folder of keys",
                remedy="Run `rlmq keys`",
            ) from error

    def _refuse_open(self, path: Path, found: os.stat_result) -> None:
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        if credentials is not None and self.folder == Path(credentials):
            return  # systemd guards it, with rights that `stat` does not show
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (os.getuid(), 0):
            mode = "700" if stat.S_ISDIR(found.st_mode) else "600"
            raise UsageError(
                str(path),
                got=f"mode {stat.S_IMODE(found.st_mode):o} of user {found.st_uid}",
                expected=f"mode {mode} of this user",
                remedy=f"Run `chmod {mode} {path}`; make the keys anew if others may have read them",
            )


@dataclass(slots=True)
class Door:
    """Answers ZeroMQ's question whether a key may come in (ZAP, RFC 27), on the thread that owns the socket.

    A peer that may is known by the name of its key from then on (`User-Id` of each of its messages). Keys that
    are added to the folder or taken away count from the next connection on.
    """

    keys: Keys
    socket: zmq.Socket[bytes]
    _speakers: dict[bytes, str] = field(default_factory=dict)
    _read_at_ns: int = -1

    def __post_init__(self) -> None:
        self._look()
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> tuple[str, str] | None:
        """Answer one question; returns the address and key of a peer that was refused. Raises zmq.Again."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        version, number, domain, address, _identity, mechanism = frames[:6]
        key = z85.encode(frames[6]) if mechanism == b"CURVE" and len(frames) == 7 else b""
        self._look()
        name = self._speakers.get(key, "") if domain == _DOMAIN else ""
        code, text = (b"200", b"") if name else (b"400", b"unknown key")
        self.socket.send_multipart([version, number, code, text, name.encode(), b""])
        return None if name else (address.decode(errors="replace"), key.decode())

    def _look(self) -> None:
        changed_at_ns = self.keys.folder.stat().st_mtime_ns if self.keys.folder.is_dir() else 0
        if changed_at_ns != self._read_at_ns:
            self._speakers = self.keys.speakers()
            self._read_at_ns = changed_at_ns
