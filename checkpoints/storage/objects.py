"""An object store, by obstore: no key is renamed or changed in place, conditional requests decide between writers."""

from __future__ import annotations

import bisect
import dataclasses
import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeVar, final

from meshpar.checkpoints.storage.checksums import combine_sums, crc32
from meshpar.checkpoints.storage.files import OrderedBytes, Readable
from meshpar.core.errors import CheckpointError, StoreError
from meshpar.process.imports import need

T = TypeVar("T")
Version = dict[str, str]  # ETag and version of an object: Google replaces by the version, others by the ETag
SCHEMES = ("s3", "gs", "az")
TRIES = 3  # of a request, besides those of obstore, which does not repeat what it cannot know to be harmless
CLIENT = {
    # where the environment names such an endpoint
    "allow_http": True,
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(seconds=120),
}
RETRY = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=90),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}
_PIECE_BYTES = 4 << 20  # of one request, where bytes are fetched ahead
_WINDOW_BYTES = 16 << 20  # fetched ahead at once; of one request, where bytes go into place
_CHUNK_BYTES = 1 << 20  # of an answer that are copied at once: then they are in a core's cache
_REQUESTS = 8  # at once, of one read; four tensors are read at once
_UPLOAD_BYTES, _UPLOADS_AT_ONCE, _MOST_PARTS = 8 << 20, 4, 9_000  # S3 takes 10 000 parts of an upload
_REMEDY = (  # obstore has no class for missing credentials, nor for a listing or an upload that is refused
    "check the credentials in the store's usual environment (they must allow this and not have expired), the bucket, "
    "its endpoint and region, and the network, then run this again"
)
READERS = 4  # tensors that a restore reads at once, and runs of one tensor


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """A key of a store, or a folder of keys, with the verbs of :class:`meshpar.checkpoints.storage.place.Place`."""

    root: str  # scheme://bucket
    key: str  # without leading and trailing slashes
    listed: bool | None = field(default=None, compare=False)  # as a folder, by a listing; None: it is in no listing
    mounted: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"

    def __truediv__(self, name: str, /) -> ObjectPath:
        return ObjectPath(self.root, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return "." + self.name.rpartition(".")[2] if "." in self.name[1:] else ""

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.root, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    def resolve(self) -> ObjectPath:
        return self

    absolute = expanduser = resolve

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self._head() is not None

    def is_symlink(self) -> bool:
        return False

    def is_dir(self) -> bool:
        """Return whether any key is below this one."""

        def any_key(store: Any) -> bool:  # noqa: ANN401 - one of obstore's classes
            return bool(next(iter(_obstore().list(store, self._prefix, chunk_size=1)), None))

        return self._ask("listing", any_key) if self.listed is None else self.listed

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the keys and folders directly below. Asks for all keys: some servers list folders that have none."""
        children = sorted({path.partition("/")[:2] for path in self.names()})
        return (dataclasses.replace(self / name, listed=bool(slash)) for name, slash in children)

    def names(self) -> list[str]:
        """Return every key below this one, by the rest of its name."""
        return [entry["path"][len(self._prefix or "") :] for entry in self._list()]

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def size(self) -> int:
        if (head := self._head()) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return int(head["size"])

    def free_bytes(self) -> float:
        return math.inf

    def reader(self, *, links: bool = True) -> ReadObject:
        del links
        return ReadObject(self)

    def untouched_s(self) -> float:
        """Return the seconds since the youngest key here was written, by the clock of the store."""
        youngest, clock = max((entry["last_modified"] for entry in self._list()), default=None), self.with_name(".now")
        clock.write_durably(b"")
        now = clock._head()
        clock.unlink()
        return 0.0 if youngest is None or now is None else (now["last_modified"] - youngest).total_seconds()

    def below(self) -> dict[str, tuple[str | None, int, float]]:
        """Return ETag, size and time of every key below this one, by the rest of its name; of this one by ``""``."""
        start, head = len(self._prefix or ""), self._head()
        return {
            entry["path"][start:]: (entry["e_tag"], entry["size"], entry["last_modified"].timestamp())
            for entry in self._list() + ([] if head is None else [head])
        }

    def read_version(self) -> tuple[bytes, Version] | None:
        def get(store: Any) -> tuple[bytes, Version]:  # noqa: ANN401
            answer = _obstore().get(store, self.key)
            version = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta[name] is not None}
            return bytes(answer.bytes()), version

        try:
            return self._ask("reading", get)
        except FileNotFoundError:
            return None

    def read_small(self) -> bytes | None:
        version = self.read_version()
        return None if version is None else version[0]

    def read_text(self, encoding: str = "utf-8") -> str:
        if (data := self.read_small()) is None:
            raise FileNotFoundError(f"there is no {self}")
        return data.decode(encoding)

    def write_durably(self, data: bytes) -> None:
        self._ask("writing", lambda store: _obstore().put(store, self.key, data, use_multipart=False))

    def create(self, data: bytes, *, replaces: Version | None = None) -> bool:
        """Write bytes that are this writer's alone: an attempt whose answer was lost is recognised by them."""
        mode = "create" if replaces is None else replaces

        def put(store: Any) -> bool:  # noqa: ANN401
            try:
                _obstore().put(store, self.key, data, mode=mode, use_multipart=False)
            except (_errors().AlreadyExistsError, _errors().PreconditionError, FileNotFoundError):
                return self.read_small() == data
            return True

        return self._ask("writing", put)

    def make(self) -> bool:
        return False  # a store has no folders

    def rmdir(self) -> None:
        """Do nothing: a folder without keys is none."""

    def flush(self) -> None:
        """Do nothing: what a store has taken is kept."""

    def delete(self) -> None:
        if self.listed is not False:
            self.remove_all()
        if not self.listed:
            self.unlink()

    def unlink(self, missing_ok: bool = False) -> None:
        del missing_ok  # stores do not tell
        self._ask("deleting", partial(_deleted, keys=[self.key]))

    def remove_all(self) -> None:
        """Delete every key below this one."""
        assert self.key, "a whole bucket"
        self._ask("deleting", partial(_deleted, keys=[entry["path"] for entry in self._list()]))

    @contextmanager
    def writing(self, expected_bytes: int = 0) -> Iterator[Callable[[Any], object]]:
        """Yield what takes an object's bytes; up to 5 pieces of 8 MiB, from 72 GiB on of more, are in memory."""
        piece = max(_UPLOAD_BYTES, -(-expected_bytes // _MOST_PARTS))
        with self._raising("writing"):
            at_once = {"buffer_size": piece, "max_concurrency": _UPLOADS_AT_ONCE}
            writer = _obstore().open_writer(self._store(), self.key, **at_once)

        def write(data: Any) -> None:  # noqa: ANN401 - a buffer
            with self._raising("writing"):
                writer.write(bytes(data))  # it keeps what it is given, and our blocks are used again

        try:
            yield write
        except BaseException as error:
            with suppress(_errors().BaseError):
                writer.__exit__(type(error), error, error.__traceback__)  # aborts the upload
            raise
        with self._raising("writing"):
            writer.close()

    def _head(self) -> dict[str, Any] | None:
        try:
            return self._ask("asking for", lambda store: _obstore().head(store, self.key)) if self.key else None
        except FileNotFoundError:
            return None

    def _list(self) -> list[dict[str, Any]]:
        """Return what the store tells of every key below this one."""
        pages = self._ask("listing", lambda store: list(_obstore().list(store, self._prefix)))
        return [entry for page in pages for entry in page if entry["path"] != self.key]

    @property
    def _prefix(self) -> str | None:
        return f"{self.key}/" if self.key else None

    def _store(self) -> Any:  # noqa: ANN401
        with self._raising("opening"):
            return _store(self.root, os.getpid())

    def _ask(self, doing: str, act: Callable[[Any], T]) -> T:
        """Return what ``act`` returns for the store; tries again where trying may help."""
        with self._raising(doing):
            for attempt in range(TRIES):
                try:
                    return act(self._store())
                except _errors().GenericError:
                    if attempt == TRIES - 1:
                        raise
                    time.sleep(0.2)
        raise AssertionError

    @contextmanager
    def _raising(self, doing: str) -> Iterator[None]:
        """Raise CheckpointError that names the store, the key and the remedy instead of an error of the store."""
        try:
            yield
        except (_errors().BaseError, OSError) as error:
            if isinstance(error, (FileNotFoundError, CheckpointError)):
                raise
            raise StoreError(f"{doing} {self} failed: {_short_text(error)}; {_REMEDY}") from error


@final
class ReadObject(Readable):
    """An object open for reads of ranges, which raise CheckpointError once it is no longer the one that was opened."""

    least_run_bytes, most_waste_bytes = 64 << 10, 64 << 10  # a request costs as much as reading this

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        if (head := path._head()) is None:
            raise CheckpointError(
                f"cannot open {path}: there is no such key; retention or prune deletes steps that are not pinned"
            )
        self.size, self.tag = int(head["size"]), head["e_tag"]
        self._kept: list[tuple[int, memoryview]] = []

    def fill(self, view: memoryview, position: int) -> None:
        if (piece := self.kept(position, position + len(view))) is not None:
            view[:] = piece
        else:
            self._into(view, position)

    def summed(self, view: memoryview, position: int, before: int = 0) -> int:
        if (piece := self.kept(position, position + len(view))) is not None:
            view[:] = piece
            return crc32(piece, before)
        for sum_, count in self._into(view, position, sums=True):
            before = combine_sums(before, sum_, count)
        return before

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch small pieces (start, stop) that are read soon; pieces close to each other by one request."""
        wanted: list[tuple[int, int]] = []
        absent = {span for span in spans if 0 <= span[0] < span[1] <= self.size and self.kept(*span) is None}
        for start, stop in sorted(absent):
            begin, end = wanted[-1] if wanted else (0, -self.size)
            if start - end <= self.most_waste_bytes and stop - begin <= _PIECE_BYTES and wanted:
                wanted[-1] = (begin, max(stop, end))
            else:
                wanted.append((start, stop))
        rooms = [memoryview(bytearray(stop - start)) for start, stop in wanted]
        self._fetched([(room, start) for room, (start, _) in zip(rooms, wanted)])
        self._kept = sorted([*self._kept, *zip((start for start, _ in wanted), rooms)], key=lambda pair: pair[0])

    def kept(self, start: int, stop: int) -> memoryview | None:
        """Return bytes that were fetched before; None if they were not."""
        at = bisect.bisect_right(self._kept, start, key=lambda pair: pair[0]) - 1
        begin, data = self._kept[at] if at >= 0 else (0, memoryview(b""))
        return data[start - begin : stop - begin] if at >= 0 and stop <= begin + len(data) else None

    def forget(self, start: int, stop: int) -> None:
        """Do nothing: no page of this machine's is held."""

    def run(self, start: int, stop: int) -> ObjectRun:
        return ObjectRun(self, stop)

    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        with ThreadPoolExecutor(READERS, thread_name_prefix="meshpar-read") as pool:
            list(pool.map(act, items))

    def close(self) -> None:
        self._kept = []

    def _into(self, view: memoryview, position: int, *, sums: bool = False) -> list[tuple[int, int]]:
        """Fill memory by requests of equal size; return CRC-32 (0 without ``sums``) and length of each in turn."""
        count = _PIECE_BYTES if len(view) <= _WINDOW_BYTES else _WINDOW_BYTES
        pieces = [(view[start : start + count], position + start) for start in range(0, len(view), count)]
        return self._fetched(pieces, sums=sums)

    def _fetched(self, pieces: list[tuple[memoryview, int]], *, sums: bool = False) -> list[tuple[int, int]]:
        """Fill pieces of memory, several at once; return CRC-32 (0 without ``sums``) and length of each."""
        if not pieces:
            return []
        if (end := max(position + len(view) for view, position in pieces)) > self.size:
            raise CheckpointError(f"{self.path} is truncated: expected bytes up to {end}, the object has {self.size}")

        def get(store: Any, view: memoryview, position: int) -> tuple[int, int]:  # noqa: ANN401
            answer = _obstore().get(store, self.path.key, options={"range": (position, position + len(view))})
            if answer.meta["e_tag"] != self.tag:  # its bytes fit none that were read before
                raise StoreError(
                    f"{self.path} was replaced while it was read; read it again when no other job writes it"
                )
            done = checksum = 0
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                data = memoryview(chunk)[: len(view) - done]
                view[done : done + len(data)] = data
                done, checksum = done + len(data), crc32(data, checksum) if sums else 0
            if done != len(view):
                raise _errors().GenericError("the answer is shorter than the range that was asked for")
            return checksum, done

        def fetch(piece: tuple[memoryview, int]) -> tuple[int, int]:
            return self.path._ask("reading", partial(get, view=piece[0], position=piece[1]))

        try:
            if len(pieces) == 1:
                return [fetch(pieces[0])]
            with ThreadPoolExecutor(min(len(pieces), _REQUESTS), thread_name_prefix="meshpar-get") as pool:
                return list(pool.map(fetch, pieces))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path} is gone: the step was deleted or replaced while it was read") from error


@final
class ObjectRun(OrderedBytes):
    """Bytes of an object that are read from front to back, fetched some 16 MiB ahead; larger pieces go into place."""

    def __init__(self, file: ReadObject, stop: int) -> None:
        self._file, self._stop = file, stop
        self._room, self._ahead, self._start = memoryview(b""), memoryview(b""), 0

    def fill(self, view: memoryview, position: int) -> None:
        done, end = 0, position + len(view)
        while done < len(view):
            at = position + done
            if (fetched := self._file.kept(at, end)) is not None:
                piece = fetched
            elif 0 <= at - self._start < len(self._ahead):
                piece = self._ahead[at - self._start : end - self._start]
            else:
                count = min(_WINDOW_BYTES, max(self._stop, end) - at)
                if len(self._room) < count:
                    self._room = memoryview(bytearray(count))
                self._ahead = memoryview(b"")  # until it is filled
                self._file.fill(self._room[:count], at)
                self._ahead, self._start = self._room[:count], at
                continue
            view[done : done + len(piece)] = piece
            done += len(piece)

    def summed(self, view: memoryview, position: int, before: int = 0) -> int:
        whole = len(view) >= min(_WINDOW_BYTES, self._stop - position)
        return self._file.summed(view, position, before) if whole else super().summed(view, position, before)


def _obstore() -> Any:  # noqa: ANN401 - a package that may not be installed
    return need("obstore", extra="object-store")


def _errors() -> Any:  # noqa: ANN401
    return need("obstore.exceptions", extra="object-store")


@lru_cache(maxsize=64)
def _store(root: str, process: int) -> Any:  # noqa: ANN401 - its threads do not survive a fork: one for each process
    """Open a store with the credentials of its usual environment, which obstore reads."""
    del process
    return need("obstore.store", extra="object-store").from_url(root, client_options=CLIENT, retry_config=RETRY)


def _deleted(store: Any, keys: list[str]) -> None:  # noqa: ANN401
    try:
        _obstore().delete(store, keys)
    except FileNotFoundError:
        if len(keys) > 1:  # another deletes, too
            for key in keys:
                _deleted(store, [key])


def _short_text(error: Exception) -> str:
    """Return an error's first line, or the server's status and code if it answered."""
    text = str(error).strip() or type(error).__name__
    status, code = re.search(r"status code: (\d+ [A-Z][A-Za-z ]*)", text), re.search(r"<Code>(\w+)</Code>", text)
    if status is None:
        return text.splitlines()[0][:300]
    return f"the store answered {status[1]}{f' ({code[1]})' if code else ''}"
