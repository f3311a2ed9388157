"""The user's own Python: `file.py:function`, imported by path, or `package.module:function`, as installed.

User code travels as a file, never as an object. A relative file is looked up beside the recipe (see
`rlmq.common.recipe.load`); its siblings can be imported from it as from a script.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlmq.common.errors import UsageError
from rlmq.common.script import run_script

MAIN = "__main__"
"""In the place of a function's name: the file itself, run as a script (see `rlmq.common.script`)."""


def split_spec(spec: str, *, subject: str) -> tuple[str, str]:
    """`"rewards.py:correct"` as `("rewards.py", "correct")`, `"my.rewards:correct"` as `("my.rewards", "correct")`.

    Raises:
        UsageError: another form.
    """
    if not is_spec(spec):
        raise UsageError(subject, got=repr(spec), expected="file.py:function", remedy=_spec_remedy(spec))
    file, _, function = spec.rpartition(":")
    return file, function


def is_spec(text: str) -> bool:
    """Whether the text has the form `file.py:function` or `package.module:function`."""
    file, _, function = text.rpartition(":")
    return function.isidentifier() and (file.endswith(".py") or _is_module(file))


def is_file_spec(text: str) -> bool:
    """Whether the text has the form `file.py:function`."""
    return is_spec(text) and not _is_module(text.rpartition(":")[0])


def _is_module(name: str) -> bool:
    """A dot is part of it: a bare word before a colon is something else, in most places."""
    return "." in name and not name.endswith(".py") and all(part.isidentifier() for part in name.split("."))


def source_file(spec: str, folder: Path, *, subject: str) -> Path:
    """The file that holds the function.

    Raises:
        UsageError: another form, or no such file or module.
    """
    file, _ = split_spec(spec, subject=subject)
    if not _is_module(file):
        return find_beside(file, folder, subject=subject).resolve()
    try:
        found = importlib.util.find_spec(file)
    except (ImportError, ValueError):  # a package on the way to it
        found = None
    if found is None or found.origin is None:
        raise UsageError(
            subject, got=f"no module {file}", expected="one that can be imported", remedy="Or name a file"
        )
    return Path(found.origin)


def spec_of(function: Callable[..., Any], *, subject: str) -> str:
    """`"/path/rewards.py:correct"` of a function at the top of a file.

    Raises:
        UsageError: a lambda, a method, one that is defined inside another, or no Python function.
    """
    if not inspect.isfunction(function) or not function.__qualname__.isidentifier():
        raise UsageError(subject, got=repr(function), expected="a function at the top of a file")
    return f"{Path(function.__code__.co_filename).resolve()}:{function.__name__}"


def find_beside(name: str, folder: Path, *, subject: str) -> Path:
    """The file or folder `name`, absolute or relative to the recipe's folder.

    Raises:
        UsageError: it is not there; the message names the place tried.
    """
    path = folder / Path(name).expanduser()
    if not path.exists():
        near = difflib.get_close_matches(Path(name).name, _names_in(path.parent), 1)
        hint = f"Did you mean {near[0]!r}?" if near else "Relative names are looked up in the recipe's folder"
        raise UsageError(subject, got=f"{name!r}, which is not there", expected=f"a file at {path}", remedy=hint)
    return path


def load_function(spec: str, folder: Path, *, subject: str) -> Callable[..., Any]:
    """Import `file.py` by path and return its function.

    Args:
        spec: `file.py:function`, the file absolute or relative to `folder`; or `package.module:function`.
        folder: the recipe's folder.
        subject: what the function is for (`"reward.0.function"`), the beginning of error messages.

    Raises:
        UsageError: another form, no such file or function, or the file raises when imported: one message
            with the place in the user's file.
    """
    file, name = split_spec(spec, subject=subject)
    if name == MAIN:
        path = source_file(spec, folder, subject=subject)
        _make_siblings_importable(path.parent)
        return partial(run_script, path)
    path = source_file(spec, folder, subject=subject)
    module = _installed(file, path, subject) if _is_module(file) else load_module(path, subject=subject)
    function = getattr(module, name, None)
    if callable(function):
        found: Callable[..., Any] = function
        return found
    if function is not None:
        raise UsageError(
            f"{subject} ({spec})", got=f"a {type(function).__name__} named {name!r}", expected="a function"
        )
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    near = difflib.get_close_matches(name, own, 1) or own[:1]
    raise UsageError(
        f"{subject} ({spec})",
        got=f"no function {name!r} in {file}",
        expected=f"one of {', '.join(sorted(own))}" if own else "a function defined there",
        remedy=f"Did you mean {file}:{near[0]}?" if near else "",
    )


def _installed(name: str, path: Path, subject: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the module does when imported
        raise user_error(error, path, subject=subject) from error


def source_hash(spec: str, folder: Path) -> str:
    """16 hex digits of the file that holds the function, so that processes and resumed runs notice a change.

    Raises:
        UsageError: another form, or no such file.
    """
    return _digest(source_file(spec, folder, subject=spec).read_bytes())


def user_error(error: BaseException, path: Path, *, subject: str) -> UsageError:
    """What went wrong in the user's code as one message: the deepest line of their own files, and the text.

    Args:
        error: what the user's code raised.
        path: the user's file; frames in its folder count as theirs.
        subject: the beginning of the message.
    """
    place = _place(error, path)
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip()
    kind = type(error).__name__
    missing = isinstance(error, ModuleNotFoundError)
    return UsageError(
        subject,
        got=f"{kind} at {place}" + (f": {text}" if text else ""),
        remedy="Install it, or correct the import" if missing else "Correct this line",
    )


def _place(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    place, trace = str(path), error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.is_relative_to(path.parent) and "site-packages" not in file.parts:
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


class _FreshLoader(importlib.machinery.SourceFileLoader):
    """Compiles the source each time: bytecode caches go by whole seconds, and are written beside the file."""

    def get_code(self, fullname: str) -> types.CodeType:
        code: types.CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_module(path: Path, *, subject: str) -> types.ModuleType:
    """Import a user's file by path. Raises UsageError: it is no file, or raises when imported."""
    if not path.is_file():
        raise UsageError(subject, got=f"{path}, which is no file", expected="a Python file")
    path = path.resolve()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(subject, got=f"{path}: {error.strerror}", expected="a readable Python file") from error
    # The content is part of the name: an edited file is another module, an unchanged one is imported once.
    name = f"rlmq_user_{path.stem}_{_digest(str(path).encode() + source)}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    module = types.ModuleType(name)
    loader = _FreshLoader(name, str(path))
    module.__file__, module.__loader__ = str(path), loader
    module.__spec__ = importlib.util.spec_from_file_location(name, path, loader=loader)
    sys.modules[name] = module
    _make_siblings_importable(path.parent)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file does when imported
        del sys.modules[name]
        raise user_error(error, path, subject=subject) from error
    return module


def _make_siblings_importable(folder: Path) -> None:
    """As for a script: the file's folder comes first."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _names_in(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _spec_remedy(spec: str) -> str:
    return (
        f"Add the function's name: {spec}:NAME" if spec.endswith(".py") else "Write for example rewards.py:correct"
    )
