"""Checkpoints as folders: `checkpoints/step-000012/`, which transformers loads as a model.

A checkpoint is written to a hidden folder beside the others, forced to disk, and becomes one by a single
rename. Its manifest holds a SHA-256 per file; what does not match was never a checkpoint.

Who reads one holds a shared `flock` on its manifest (`reading`); a checkpoint that is read is not removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from rlmq.common.errors import DependencyError, IntegrityError, UsageError
from rlmq.consumers.checkpoint import CheckpointManifest
from rlmq.consumers.tensor_files import without_aliases, write_file, write_tensors

if TYPE_CHECKING:
    import torch

_log = structlog.get_logger(__name__)
_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST = "manifest.json"
_WEIGHTS, _OPTIMIZER, _ADAPTER = "model", "optimizer", "adapter"
# Everything of a model folder that is neither weights nor code travels along: configuration and tokenizer.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_NOT_COPIED = ("*.index.json", _MANIFEST)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileCheckpoints:
    """The checkpoints of one run, in `folder`.

    Args:
        folder: made when the first checkpoint is saved.
        max_file_bytes: weights and optimizer state beyond it go into several files.
    """

    def __init__(self, folder: Path, *, max_file_bytes: int = 5_000_000_000) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes

    def save(
        self,
        step: int,
        weights: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, torch.Tensor],
        *,
        model_folder: str | Path,
        rows: Sequence[str] = (),
        world_size: int = 1,
        recipe_hash: str = "",
        figures: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        adapter: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the checkpoint of a step; nobody sees it before it is whole and on disk.

        Args:
            step: the last trained step, which is also the policy version.
            weights: by name; tied aliases (the same memory) are stored once.
            optimizer_state: `TrainingEngine.state()`.
            model_folder: the model that training began with; its configuration and tokenizer are copied.
            rows: ids of the samples trained on since the last checkpoint.
            world_size: trainer ranks.
            recipe_hash: of the recipe that trained.
            figures: the step's metrics.
            config: what `config.json` shall say beside the model folder's.
            adapter: peft's configuration, where the trained weights are adapters: they lie in `adapter/` too.

        Raises:
            DependencyError: the disk is full or the folder cannot be written; older checkpoints are as before.
        """
        final = self.path(step)
        unfinished = self._folder / f".{final.name}.{os.getpid()}.part"
        with _telling_disk_errors(final):
            try:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                files = _copy_model_files(Path(model_folder), unfinished, weights, config or {})
                own = without_aliases(weights.items())
                files |= write_tensors(unfinished, _WEIGHTS, own, self._max_file_bytes)
                files |= write_tensors(unfinished, _OPTIMIZER, optimizer_state, self._max_file_bytes)
                if adapter is not None:
                    files |= _write_adapter(unfinished, adapter, optimizer_state, self._max_file_bytes)
                manifest = CheckpointManifest(
                    step, step, tuple(rows), world_size, files, recipe_hash, dict(figures or {})
                )
                write_file(unfinished / _MANIFEST, [msgspec.json.format(msgspec.json.encode(manifest))])
                _sync(unfinished)
                self._put_in_place(unfinished, final)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
        return final

    def _put_in_place(self, unfinished: Path, final: Path) -> None:
        """One rename. A damaged checkpoint of the same step, made again by a redo, steps aside first."""
        aside = final.with_name(f".{final.name}.{os.getpid()}.old")
        if final.exists():
            final.rename(aside)
        unfinished.rename(final)
        _sync(self._folder)
        shutil.rmtree(aside, ignore_errors=True)

    def path(self, step: int) -> Path:
        """Where the checkpoint of this step lies or would lie."""
        return self._folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, whole or not, ascending."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(p.name) for p in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> tuple[Path, CheckpointManifest] | None:
        """The newest whole checkpoint; others are skipped, with the reason logged."""
        with self.reading_newest() as found:
            return found

    @contextmanager
    def reading_newest(self, until: int | None = None) -> Iterator[tuple[Path, CheckpointManifest] | None]:
        """The newest whole checkpoint (up to a step), not to be removed meanwhile.

        Others are skipped, with the reason logged.
        """
        for path, reason in self.unfinished():
            _log.warning("checkpoint_skipped", path=str(path), reason=reason)
        for step in reversed(self.steps()):
            path = self.path(step)
            if until is not None and step > until:
                continue
            with reading(path):
                try:
                    manifest = self.verify(path)
                except IntegrityError as error:
                    _log.warning("checkpoint_skipped", path=str(path), reason=str(error))
                    continue
                yield path, manifest
                return
        yield None

    def unfinished(self) -> list[tuple[Path, str]]:
        """What an interrupted save left behind, and why it is no checkpoint."""
        parts = sorted(self._folder.glob(".step-*.part")) if self._folder.is_dir() else []
        return [(path, "its writing was interrupted before the rename") for path in parts]

    def incomplete(self) -> list[tuple[Path, str]]:
        """Checkpoints that lack their manifest or a file of it, and why; no file is read through."""
        found = []
        for path in map(self.path, self.steps()):
            try:
                missing = [name for name in _read_manifest(path).files if not (path / name).is_file()]
            except IntegrityError as error:
                found.append((path, str(error)))
            else:
                found += [(path, f"no {name}") for name in missing[:1]]
        return found

    def verify(self, path: Path) -> CheckpointManifest:
        """The manifest of a checkpoint all of whose files are as they were written.

        Raises:
            IntegrityError: a file is missing or differs, or there is no readable manifest.
        """
        manifest = _read_manifest(path)
        for name in manifest.files:
            _verify_file(path, manifest, name)
        return manifest

    def optimizer_state(self, path: Path) -> dict[str, torch.Tensor]:
        """What `TrainingEngine.load_state` needs, from a checkpoint; the hashes of its files are checked.

        Raises:
            IntegrityError: the files are damaged.
        """
        return self._tensors(path, _OPTIMIZER)

    def weights(self, path: Path) -> dict[str, torch.Tensor]:
        """The weights of a checkpoint by name, as `optimizer_state`."""
        return self._tensors(path, _WEIGHTS)

    def forget(self, after: int) -> None:
        """Remove the checkpoints of steps that were taken back."""
        for step in self.steps():
            if step > after:
                self._remove(step)

    def _tensors(self, path: Path, kind: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        manifest = _read_manifest(path)
        state: dict[str, torch.Tensor] = {}
        for name in manifest.files:
            if name.startswith(kind) and name.endswith(".safetensors"):
                _verify_file(path, manifest, name)
                state |= load_file(path / name)
        return state

    def prune(self, keep: int, protect: frozenset[int] = frozenset()) -> list[int]:
        """Remove all but the newest `keep`, except protected steps; returns the steps removed.

        What an interrupted save left behind goes too.
        """
        if keep < 1:
            raise UsageError("checkpoint.keep", got=keep, expected="at least 1")
        removed = [step for step in self.steps()[:-keep] if step not in protect and self._remove(step)]
        for leftover in (*self._folder.glob(".step-*.old"), *self._folder.glob(".step-*.part")):
            shutil.rmtree(leftover, ignore_errors=True)
        return removed

    def _remove(self, step: int) -> bool:
        """Move a checkpoint out of sight, to be deleted; False while somebody reads it."""
        path = self.path(step)
        with _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            if free:
                # Renamed first: a removal that is interrupted must not leave something that looks damaged.
                path.rename(self._folder / f".{path.name}.{os.getpid()}.old")
        return free


@contextmanager
def reading(path: Path) -> Iterator[bool]:
    """Keep a checkpoint from being removed while it is read; False when it is gone or has no manifest.

    Any process may do the same: a shared `flock` on its `manifest.json`.
    """
    with _locked(path, fcntl.LOCK_SH) as held:
        yield held and path.is_dir()


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[bool]:
    """Hold a lock on the manifest; a checkpoint without one is nobody's. False: another has the lock."""
    try:
        descriptor = os.open(path / _MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield bool(kind & fcntl.LOCK_EX)
        return
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, kind)
            yield True
            return
        yield False
    finally:
        os.close(descriptor)


def _read_manifest(path: Path) -> CheckpointManifest:
    try:
        return msgspec.json.decode((path / _MANIFEST).read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise IntegrityError(f"checkpoint {path}", got=str(error), expected=f"a readable {_MANIFEST}") from error


def _verify_file(path: Path, manifest: CheckpointManifest, name: str) -> None:
    file, expected = path / name, manifest.files[name]
    if not file.is_file():
        raise IntegrityError(f"checkpoint file {file}", got="nothing", expected="the file of its manifest")
    if (found := _sha256(file)) != expected:
        raise IntegrityError(f"checkpoint file {file}", got=f"SHA-256 {found}", expected=expected)


@contextmanager
def _telling_disk_errors(subject: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        raise DependencyError(
            f"checkpoint {subject}",
            got=error.strerror or str(error),
            expected="room on the disk" if full else "a folder that can be written",
            remedy="Free disk space and give the same command again" if full else "Correct the path or its rights",
        ) from error


def _copy_model_files(
    source: Path, target: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, str]:
    """Configuration and tokenizer; the configuration tells the type of the weights. Returns the files' SHA-256."""
    hashes = {}
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if any(path.match(skipped) for skipped in _NOT_COPIED):
                continue
            content = path.read_bytes()
            if path.name == "config.json":
                content = _config(content, weights, config)
            hashes[path.name] = write_file(target / path.name, [content])
    if "config.json" not in hashes:
        raise UsageError(f"model folder {source}", expected="a config.json in it")
    return hashes


def _write_adapter(
    target: Path, config: Mapping[str, Any], state: Mapping[str, torch.Tensor], max_file_bytes: int
) -> dict[str, str]:
    """A folder that peft loads beside the model that training began with. Returns the files' SHA-256."""
    folder = target / _ADAPTER
    folder.mkdir()
    own = {f"base_model.model.{n.removeprefix('master.')}": t for n, t in state.items() if n.startswith("master.")}
    hashes = write_tensors(folder, "adapter_model", own, max_file_bytes)
    content = json.dumps(config, indent=2, sort_keys=True).encode()
    hashes["adapter_config.json"] = write_file(folder / "adapter_config.json", [content])
    _sync(folder)
    return {f"{_ADAPTER}/{name}": value for name, value in hashes.items()}


def _config(config: bytes, weights: Mapping[str, torch.Tensor], more: Mapping[str, Any]) -> bytes:
    dtypes = {str(t.dtype).removeprefix("torch.") for t in weights.values() if t.is_floating_point()}
    if len(dtypes) != 1 and not more:
        return config
    told = {**json.loads(config), **more}
    if len(dtypes) == 1:
        told.pop("torch_dtype", None)
        told["dtype"] = dtypes.pop()
    return (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
