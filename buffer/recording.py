"""A recording: rows that have ended, with all their columns and their lineage, as Parquet segments.

::

    PLACE/train-000012-0000.parquet               what one claim of the recorder's brought of a step
    PLACE/train-000001-to-000040-0000.parquet     such files in one: 256, or `record.segment_mb` of them
    PLACE/eval-000010.parquet                     a whole evaluation
    PLACE/_train.manifest.json                    the segments of a table: steps, rows, bytes, SHA-256

A place is a folder or a URL of `pyarrow.fs`. A segment appears whole or not at all, and its rows are acknowledged
after that; a crash in between writes rows twice, and readers take a sample id once. The files need nothing of rlmq
to be read. Beside the columns of its table a row has `end_state, end_reason, end_step`, and `lineage`: who wrote
which columns and when, with which policy version and tag, as JSON. The manifest follows the files: what it does not
name yet is a segment all the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rlmq.common.errors import DependencyError, IntegrityError, UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder

_NAME = re.compile(r"(?P<table>[a-z][a-z0-9_]*)-(?P<first>\d{6,})(?:-to-(?P<last>\d+))?(?:-\d+)?\.parquet")
_MANIFEST = "manifest.json"
_ROW_GROUP = 4096


class Segment(msgspec.Struct, frozen=True):
    """One Parquet file; `sha256` is empty, and rows and bytes are -1, while no manifest tells them."""

    name: str
    table: str
    first_step: int
    last_step: int
    rows: int = -1
    bytes: int = -1
    sha256: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """The segments of one table."""

    segments: tuple[Segment, ...]
    version: int = 1


def place_of(run: RunFolder, recipe: Recipe | None = None) -> str | Path:
    """Where the recording of a run lies: its own folder, or below `record.to`."""
    if recipe is None and not run.recipe.is_file():
        return run.samples
    to = (recipe or load_recipe(run.recipe).recipe).record.to
    return run.samples if to is None else f"{to.rstrip('/')}/{run.run_id}"


class Recording:
    """Reads a recording.

    Args:
        place: a folder, or a URL (`s3://bucket/run`, `file:///…`).
        filesystem: where the place is a path of; none: as the place says.

    Raises:
        UsageError: a URL that names no file system.
    """

    def __init__(self, place: str | Path, *, filesystem: pafs.FileSystem | None = None) -> None:
        self.place = place
        if filesystem is not None:
            self._fs, self._base = filesystem, str(place)
        elif isinstance(place, str) and "://" in place:
            try:
                self._fs, self._base = pafs.FileSystem.from_uri(place)
            except (pa.ArrowInvalid, OSError) as error:
                raise UsageError(f"recording {place}", got=str(error), expected="a folder or a URL") from error
        else:
            self._fs, self._base = pafs.LocalFileSystem(), str(Path(place).absolute())

    def segments(self, table: str) -> list[Segment]:
        """The segments of a table, by first step and name."""
        told = {one.name: one for one in self._manifest(table).segments}
        found = []
        for info in self._files():
            match = _NAME.fullmatch(info.base_name)
            if match is not None and match["table"] == table:
                first = int(match["first"])
                plain = Segment(info.base_name, table, first, int(match["last"] or first))
                found.append(told.get(info.base_name, plain))
        return sorted(found, key=lambda one: (one.first_step, one.name))

    def tables(self) -> list[str]:
        """Tables that have a segment."""
        names = (_NAME.fullmatch(info.base_name) for info in self._files())
        return sorted({match["table"] for match in names if match is not None})

    def read(self, table: str = "train", *, steps: Iterable[int] | None = None) -> pa.Table:
        """Rows of a table by sample id, each once: of one that was written twice, the copy that says how it ended.

        Args:
            steps: those in which rows were admitted (the column `step`); none: all.

        Raises:
            UsageError: there are none. IntegrityError: a file that is no Parquet.
        """
        wanted = None if steps is None else sorted(set(steps))
        parts = []
        for one in self.segments(table):
            if wanted is None or any(one.first_step <= step <= one.last_step for step in wanted):
                part = self._parquet(one)
                if wanted is not None and one.first_step != one.last_step:
                    part = part.filter(pc.is_in(part["step"], pa.array(wanted, part.schema.field("step").type)))
                parts.append(part)
        if not parts:
            got = f"no rows of table {table}" + (f" and steps {wanted}" if wanted is not None else "")
            raise UsageError(f"recording {self.place}", got=got, expected=_spans(self.segments(table)))
        return _each_once(pa.concat_tables(parts, promote_options="default"))

    def verify(self) -> list[str]:
        """Each file that is not what its manifest says, and each that is gone."""
        found = []
        for table in {*self.tables(), *(i.base_name[1:].split(".")[0] for i in self._files(_MANIFEST))}:
            for one in self._manifest(table).segments:
                try:
                    content = self._bytes(one.name)
                except FileNotFoundError:
                    found.append(f"{one.name}: gone")
                    continue
                if (sha256 := hashlib.sha256(content).hexdigest()) != one.sha256:
                    found.append(f"{one.name}: SHA-256 {sha256}, in the manifest {one.sha256}")
        return found

    def paths(self, table: str) -> list[str]:
        """The files of a table, as other readers name them."""
        prefix = "" if isinstance(self._fs, pafs.LocalFileSystem) else f"{str(self.place).split('://')[0]}://"
        return [f"{prefix}{self._base}/{one.name}" for one in self.segments(table)]

    def _files(self, ending: str = ".parquet") -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(self._base, allow_not_found=True)
        found: list[pafs.FileInfo] = self._fs.get_file_info(selector)
        return [one for one in found if one.base_name.endswith(ending) and not one.base_name.startswith(".")]

    def _bytes(self, name: str) -> bytes:
        with self._fs.open_input_stream(f"{self._base}/{name}") as stream:
            return bytes(stream.read())

    def _parquet(self, one: Segment) -> pa.Table:
        try:
            return pq.read_table(pa.BufferReader(self._bytes(one.name)))
        except (pa.ArrowException, OSError) as error:
            first = str(error).splitlines()[0]
            raise IntegrityError(
                f"recording {self.place}, {one.name}", got=first, expected="a Parquet file"
            ) from error

    def _manifest(self, table: str) -> Manifest:
        try:
            return msgspec.json.decode(self._bytes(f"_{table}.{_MANIFEST}"), type=Manifest)
        except (FileNotFoundError, NotADirectoryError):
            return Manifest(())
        except (OSError, msgspec.MsgspecError) as error:
            subject = f"recording {self.place}, _{table}.{_MANIFEST}"
            raise IntegrityError(subject, got=str(error), expected="a manifest") from error


class RecordingWriter(Recording):
    """The one writer of a table's segments; another table may have another writer.

    Args:
        segment_bytes: files of single claims become one segment when they have so many together.
        most_files: or when they are so many.
        mark: part of the names on a file system that cannot refuse to replace a file: of this process alone.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        segment_bytes: int = 64 << 20,
        most_files: int = 256,
        mark: str = "",
        filesystem: pafs.FileSystem | None = None,
    ) -> None:
        super().__init__(place, filesystem=filesystem)
        self._segment_bytes, self._most_files = segment_bytes, most_files
        self._local = isinstance(self._fs, pafs.LocalFileSystem)
        self._mark = "" if self._local else mark

    def add(self, table: str, step: int, rows: pa.Table) -> Segment:
        """Write rows of one step; they are on disk when this returns.

        Raises:
            DependencyError: the disk is full or the place cannot be written.
        """
        with self._telling():
            added = self._new(table, step, step, rows)
            segments = [*self._manifest(table).segments, added]
            self._write_manifest(table, segments)
            self._merge(table, segments)
        return added

    def put(self, table: str, step: int, rows: pa.Table) -> Segment:
        """Write the only segment of a step, in the place of one that is there; raises as `add`."""
        content, name = _parquet(rows), f"{table}-{step:06d}.parquet"
        with self._telling():
            self._replace(name, content)
            others = [one for one in self._manifest(table).segments if one.name != name]
            made = _segment(name, table, step, step, rows, content)
            self._write_manifest(table, [*others, made])
        return made

    def _new(self, table: str, first: int, last: int, rows: pa.Table) -> Segment:
        """Under the next free name; never in the place of a file of a recorder that lost its lease."""
        content = _parquet(rows)
        stem = f"{table}-{first:06d}" + (f"-to-{last:06d}" if last != first else "")
        number = sum(one.name.startswith(f"{stem}-") for one in self.segments(table))
        while True:
            name = f"{stem}-{self._mark}{number:04d}.parquet"
            try:
                self._create(name, content)
            except FileExistsError:
                number += 1
            else:
                return _segment(name, table, first, last, rows, content)

    def _merge(self, table: str, segments: Sequence[Segment]) -> None:
        """Files of one step each become one segment, when there is enough of them. Named first, removed after."""
        small = [one for one in segments if one.first_step == one.last_step and one.bytes < self._segment_bytes]
        enough = len(small) >= self._most_files or sum(one.bytes for one in small) >= self._segment_bytes
        if table == "eval" or len(small) < 2 or not enough:
            return
        rows = _each_once(pa.concat_tables([self._parquet(one) for one in small], promote_options="default"))
        first, last = min(one.first_step for one in small), max(one.last_step for one in small)
        made = self._new(table, first, last, rows)
        gone = {one.name for one in small}
        self._write_manifest(table, [*(one for one in segments if one.name not in gone), made])
        for name in gone:
            with contextlib.suppress(FileNotFoundError):
                self._fs.delete_file(f"{self._base}/{name}")

    def _write_manifest(self, table: str, segments: Sequence[Segment]) -> None:
        content = msgspec.json.format(msgspec.json.encode(Manifest(tuple(segments))))
        self._replace(f"_{table}.{_MANIFEST}", content)

    def _create(self, name: str, content: bytes) -> None:
        path = f"{self._base}/{name}"
        if not self._local:
            if self._fs.get_file_info(path).type != pafs.FileType.NotFound:
                raise FileExistsError(errno.EEXIST, "exists", path)
            self._replace(name, content)
            return
        temporary = self._temporary(name, content)
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if Path(path).exists():  # a file system without hard links
                raise FileExistsError(errno.EEXIST, "exists", path) from error
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _replace(self, name: str, content: bytes) -> None:
        """Whole or not at all: a rename here, one upload elsewhere."""
        if self._local:
            self._temporary(name, content).replace(f"{self._base}/{name}")
            return
        self._fs.create_dir(self._base)
        with self._fs.open_output_stream(f"{self._base}/{name}") as stream:
            stream.write(content)

    def _temporary(self, name: str, content: bytes) -> Path:
        folder = Path(self._base)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise DependencyError(
                f"samples in {self.place}",
                got=getattr(error, "strerror", None) or str(error),
                expected="a writable folder",
                remedy="Free disk space or correct its permissions, then give the same command again",
            ) from error


def _parquet(rows: pa.Table) -> bytes:
    buffer = io.BytesIO()
    repeated = []  # columns whose values come again; a dictionary of log-probs costs more than it saves
    for field in rows.schema:
        nested = pa.types.is_list(field.type)
        if not pa.types.is_floating(field.type.value_type if nested else field.type):
            repeated.append(f"{field.name}.list.element" if nested else field.name)
    pq.write_table(rows, buffer, compression="zstd", row_group_size=_ROW_GROUP, use_dictionary=repeated)
    return buffer.getvalue()


def _segment(name: str, table: str, first: int, last: int, rows: pa.Table, content: bytes) -> Segment:
    sha256 = hashlib.sha256(content).hexdigest()
    return Segment(name, table, first, last, rows.num_rows, len(content), sha256)


def _each_once(rows: pa.Table) -> pa.Table:
    """By sample id; copies that tell how the row ended, or have advantages, come first."""
    kinds = [name for name in ("end_state", "advantages") if name in rows.column_names]
    known = {f"_{name}": pc.is_null(rows[name]).cast(pa.int8()) for name in kinds}
    order = pa.table({"sample_id": rows["sample_id"], **known})
    places = pc.sort_indices(order, sort_keys=[(name, "ascending") for name in order.column_names])
    ids: list[str] = rows["sample_id"].take(places).to_pylist()
    first = [index for index, name in enumerate(ids) if index == 0 or ids[index - 1] != name]
    return rows.take(places.take(pa.array(first, pa.int64())))


def _spans(segments: Sequence[Segment]) -> str:
    """`"steps 0 to 3, 5"`."""
    spans: list[list[int]] = []
    for one in segments:
        if spans and one.first_step <= spans[-1][1] + 1:
            spans[-1][1] = max(spans[-1][1], one.last_step)
        else:
            spans.append([one.first_step, one.last_step])
    told = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
    return f"steps {told}" if told else "the samples folder of a run that has finished a step"
