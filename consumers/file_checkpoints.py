"""Checkpoints as folders: `checkpoints/step-000012/`, which transformers loads as a model.

A checkpoint is written to a hidden folder beside the others, forced to disk, and becomes one by a single
rename. Its manifest holds a SHA-256 per file; what does not match was never a checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from rlmq.common.errors import DependencyError, IntegrityError, UsageError
from rlmq.consumers.checkpoint import CheckpointManifest

if TYPE_CHECKING:
    import torch
    from torch import nn

_log = structlog.get_logger(__name__)
_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST = "manifest.json"
_WEIGHTS, _OPTIMIZER = "model", "optimizer"
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
        *,
        model: nn.Module,
        model_folder: str | Path,
        optimizer_state: Mapping[str, torch.Tensor],
        rows: Sequence[str] = (),
        world_size: int = 1,
        recipe_hash: str = "",
    ) -> Path:
        """Write the checkpoint of a step; nobody sees it before it is whole and on disk.

        Args:
            step: the last trained step, which is also the policy version.
            model: its `state_dict` is saved; tied aliases (the same memory) are stored once.
            model_folder: the model that training began with; its configuration and tokenizer are copied.
            optimizer_state: `TrainingEngine.state()`.
            rows: ids of the samples trained on since the last checkpoint.
            world_size: trainer ranks.
            recipe_hash: of the recipe that trained.

        Raises:
            DependencyError: the disk is full or the folder cannot be written; older checkpoints are as before.
        """
        final = self.path(step)
        unfinished = self._folder / f".{final.name}.{os.getpid()}.part"
        with _telling_disk_errors(final):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                weights = _without_aliases(model.state_dict().items())
                dtypes = _write_tensors(unfinished, _WEIGHTS, weights, self._max_file_bytes)
                _write_tensors(unfinished, _OPTIMIZER, optimizer_state.items(), self._max_file_bytes)
                _copy_model_files(Path(model_folder), unfinished, dtypes)
                files = {p.name: _sha256(p) for p in sorted(unfinished.iterdir())}
                manifest = CheckpointManifest(step, step, tuple(rows), world_size, files, recipe_hash)
                (unfinished / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
                for path in (*unfinished.iterdir(), unfinished):
                    _sync(path)
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
        """The newest whole checkpoint; damaged ones are skipped, with the reason logged."""
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                return path, self.verify(path)
            except IntegrityError as error:
                _log.warning("checkpoint_skipped", path=str(path), reason=str(error))
        return None

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
        from safetensors.torch import load_file

        manifest = _read_manifest(path)
        state: dict[str, torch.Tensor] = {}
        for name in manifest.files:
            if name.startswith(f"{_OPTIMIZER}") and name.endswith(".safetensors"):
                _verify_file(path, manifest, name)
                state |= load_file(path / name)
        return state

    def prune(self, keep: int, protect: frozenset[int] = frozenset()) -> list[int]:
        """Remove all but the newest `keep`, except protected steps; returns the steps removed.

        What an interrupted save left behind goes too.
        """
        if keep < 1:
            raise UsageError("checkpoint.keep", got=keep, expected="at least 1")
        candidates = [step for step in self.steps() if step not in protect]
        removed = [step for step in self.steps()[:-keep] if step in candidates]
        for step in removed:
            # Renamed first: a removal that is interrupted must not leave something that looks damaged.
            gone = self._folder / f".{self.path(step).name}.{os.getpid()}.old"
            self.path(step).rename(gone)
        for leftover in (*self._folder.glob(".step-*.old"), *self._folder.glob(".step-*.part")):
            shutil.rmtree(leftover, ignore_errors=True)
        return removed


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


def _without_aliases(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in tensors:
        memory = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        yield name, tensor


def _write_tensors(
    folder: Path, stem: str, tensors: Iterable[tuple[str, torch.Tensor]], max_file_bytes: int
) -> set[str]:
    """Safetensors files in transformers' naming; returns the float types that were written."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = max_file_bytes
    for name, tensor in tensors:
        if parts[-1] and tensor.nbytes > room:
            parts.append({})
            room = max_file_bytes
        parts[-1][name] = tensor.detach().cpu().contiguous()
        room -= tensor.nbytes
    place: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        many = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        _save_file(part, folder / f"{stem}{many}.safetensors")
        place |= dict.fromkeys(part, f"{stem}{many}.safetensors")
    if len(parts) > 1:
        total = sum(t.nbytes for part in parts for t in part.values())
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return {str(t.dtype).removeprefix("torch.") for part in parts for t in part.values() if t.is_floating_point()}


def _save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library tells errors of the system as text only.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def _copy_model_files(source: Path, target: Path, dtypes: set[str]) -> None:
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if not any(path.match(skipped) for skipped in _NOT_COPIED):
                shutil.copyfile(path, target / path.name)
    config = target / "config.json"
    if not config.exists():
        raise UsageError(f"model folder {source}", expected="a config.json in it")
    if len(dtypes) == 1:
        told = json.loads(config.read_text())
        told.pop("torch_dtype", None)
        told["dtype"] = dtypes.pop()
        config.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


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
