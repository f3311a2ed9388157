"""The first process of a sandbox: puts itself behind walls, then becomes the program.

Run by path as `python -I -S sandbox_child.py FACTS.json`, with nothing but the standard library. It has namespaces
of its own for mounts, network, processes and messages, a root folder with Python and the system's libraries
read-only and a small `/tmp`, an empty environment, no rights, and limits. Without a wall it ends with `REFUSED`.
"""

# Names are joined below a root that is not ours yet, and what it prints is for the file that the parent reads.
# ruff: noqa: PTH103, PTH106, PTH112, PTH114, PTH115, PTH123, PTH211, T201

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence

REFUSED = 97
PROGRAM = "/response.py"
_FIRST_USER = 0x70000000  # plus the pid: nobody's, so that processes are counted for each sandbox alone
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PROCESSES, _FILES, _OUTPUT_BYTES, _TMP = 32, 64, 1 << 20, "size=64m,nr_inodes=4096"
_LIBC = ctypes.CDLL(None, use_errno=True)


def _done(returned: int, what: str) -> None:
    if returned != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    done = _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _done(done, f"mount {target}")


def _unshare() -> None:
    """Namespaces; without root's rights, in a user namespace that maps this user only."""
    walls = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if os.geteuid() == 0 and _LIBC.unshare(walls) == 0:
        return
    user, group = os.geteuid(), os.getegid()
    _done(_LIBC.unshare(walls | _NEWUSER), "unshare")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _root(folder: str, shown: Sequence[str], program: str) -> None:
    """A root folder with the shown ones read-only, three devices and an empty `/tmp`; the old one is gone."""
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("none", folder, "tmpfs", _NOSUID | _NODEV, "size=16m,mode=755")
    for path in shown:
        if os.path.islink(path):
            os.symlink(os.readlink(path), folder + path)
        elif os.path.isdir(path):
            _bind(path, folder + path, _NOSUID | _NODEV | _RDONLY)
    os.makedirs(folder + "/dev")
    for name in ("null", "zero", "urandom"):
        open(f"{folder}/dev/{name}", "w").close()
        _mount(f"/dev/{name}", f"{folder}/dev/{name}", "", _BIND)
    with open(folder + PROGRAM, "w", errors="replace") as file:
        file.write(program)
    os.makedirs(folder + "/tmp")
    _mount("none", folder + "/tmp", "tmpfs", _NOSUID | _NODEV, f"{_TMP},mode=1777")
    os.makedirs(folder + "/old")
    old = (folder + "/old").encode()
    _done(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], folder.encode(), old), "pivot_root")
    os.chdir("/")
    _done(_LIBC.umount2(b"/old", _DETACH), "umount")
    os.rmdir("/old")
    _mount("none", "/", "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _bind(path: str, target: str, flags: int) -> None:
    os.makedirs(target)
    _mount(path, target, "", _BIND | _REC)
    kept = os.statvfs(path).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_RELATIME)
    _mount("none", target, "", _REMOUNT | _BIND | flags | kept)


def _give_up_rights(user: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _done(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _limit(memory_bytes: int, cpu_s: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: _OUTPUT_BYTES,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_NPROC: _PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        resource.setrlimit(which, (most, most))


def _become(facts: dict[str, object], user: int) -> None:
    try:
        os.setsid()
        os.chdir("/tmp")
        _give_up_rights(user)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _limit(int(str(facts["memory_bytes"])), int(str(facts["cpu_s"])))
        python = str(facts["python"])
        os.execve(python, [python, "-I", "-S", PROGRAM], {})
    except OSError as error:
        print(f"no walls: {error}", file=sys.stderr, flush=True)
    os._exit(REFUSED)


def main(facts: dict[str, object]) -> int:
    """Set up the walls, run the program behind them, and end as it did."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        _unshare()
        _root(str(facts["folder"]), str(facts["shown"]).split(os.pathsep), str(facts["program"]))
    except (OSError, KeyError) as error:
        print(f"no walls: {error}", file=sys.stderr)
        return REFUSED
    user = _FIRST_USER + os.getpid()
    child = os.fork()  # the first process of its namespace: when it ends, the kernel ends all others in it
    if child == 0:
        _become(facts, user)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        sys.exit(main(json.load(given)))
