"""Write files that other processes also read or write: completely or not at all, and a record by one run at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from parity.user_error import UserError

# Whenever the process is killed, a file that is being replaced holds either its old or its new content.


def replace(path: Path, content: str | bytes) -> None:
    """Replace a file's content. Half a surrogate pair, which UTF-8 cannot encode, is written as an escape sequence."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces the existing one when the context ends.

    Permissions stay; of a link, what it leads to is replaced. If anything is raised within the context, the existing
    file stays, and no temporary file is left.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    # The name is known before anything has it, so that a signal in between leaves nothing behind.
    draft = target.with_name(f".{target.name[:100]}-{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
        os.chmod(draft, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_read_umask())
        os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Let a signal that would end this process raise ``SystemExit`` within the context, so that no draft is left.

    The exit code is the one that a shell gives such a process. Signals that are ignored, as by ``nohup``, stay so.
    """

    def end(number: int, _: object) -> None:
        for one in taken:  # a second signal would interrupt what removes the draft
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    taken = {one: handler for one, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for one in taken:
            signal.signal(one, end)
        yield
    finally:
        for one, handler in taken.items():
            signal.signal(one, handler)


def _read_umask() -> int:
    """Return the umask: the permissions that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def free_name(path: Path, suffix: str) -> Path:
    """Return an unused path next to this one: ``run-SUFFIX.jsonl``, or else ``run-SUFFIX-2.jsonl`` and so on."""
    names = (f"{path.stem}-{suffix}{'' if n == 1 else f'-{n}'}{path.suffix}" for n in range(1, 100_000))
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))


# A file that only one process at a time writes.
#
# The lock is the kernel's (flock), so that it is released however the process ends. It is on the record itself, so
# that no lock file is left behind.


class Claim:
    """A file of lines that only this process writes until it is closed. It is created if it does not exist.

    The claim notices if others nevertheless write to the file, delete it, or cut it short.

    Args:
        path: the file's path.

    Attributes:
        path: where the file is now.
        told: called with a sentence about each such thing that others did to the file.

    Raises:
        UserError: if another process has claimed it.
    """

    def __init__(self, path: Path, told: Callable[[str], object] = lambda sentence: None) -> None:
        self.path, self.told = path, told
        path.parent.mkdir(parents=True, exist_ok=True)
        self._made = not path.exists()
        self._first = b""
        self._descriptor, self._size = self._open_and_lock()
        _claims.add(self)

    def content(self) -> bytes:
        """Return the file's content."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def begin(self, content: bytes) -> None:
        """Replace the file's content by the first lines of a record."""
        self._first = content[: content.find(b"\n") + 1]
        os.ftruncate(self._descriptor, 0)
        self._size = 0
        self._write_bytes(content)

    def replace(self, content: bytes) -> None:
        """Replace the file's content in one step, so that a killed process leaves either the old or the new content.

        Another process that tries to claim the file in the meantime finds it claimed or gone.
        """
        self._first = content[: content.find(b"\n") + 1]
        replace(self.path, content)
        self._open_again()

    def append(self, data: bytes) -> None:
        """Add lines. All of them are in the file when this returns, and none if it raises an ``OSError``."""
        self._repair_file()
        self._write_bytes(data)

    @property
    def size(self) -> int:
        """Return the file's size in bytes, as far as this process has written it."""
        return self._size

    def cut(self, size: int) -> None:
        """Remove everything that was written after the file had this size."""
        if os.fstat(self._descriptor).st_size == self._size > size:
            os.ftruncate(self._descriptor, size)
            self._size = size

    def set_aside(self, aside: Path) -> None:
        """Rename the file to a path that no file has, and claim a new file."""
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.path, aside)
        self._open_again()

    def close(self) -> None:
        """Release the file, and remove it if it is new and nothing was written to it."""
        if self._descriptor < 0:
            return
        if self._made and os.fstat(self._descriptor).st_size == 0 and _leads_to(self.path, self._descriptor):
            self.path.unlink()
            with suppress(OSError):
                self.path.parent.rmdir()
        self.forget()

    def forget(self) -> None:
        """Close the file without removing it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        _claims.discard(self)

    def _open_again(self) -> None:
        before = self._descriptor
        self._descriptor, self._size = self._open_and_lock()
        os.close(before)

    def _open_and_lock(self) -> tuple[int, int]:
        """Claim the file, and return its descriptor, which holds the lock, and its size."""
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise UserError(
                    f"another run is writing to {self.path}; wait until it ends, or give this one another "
                    "name or folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            if _leads_to(self.path, descriptor):
                return descriptor, os.fstat(descriptor).st_size
            os.close(descriptor)  # somebody renamed the file in between

    def _repair_file(self) -> None:
        """Find out what others did to the file since the last line, repair it as far as possible, and report it."""
        if not _leads_to(self.path, self._descriptor):
            lost, content, deleted = self.path, self.content(), not os.path.lexists(self.path)
            self.path = self.path if deleted else free_name(self.path, "continued")
            self._open_again()
            self._write_bytes(content)
            what = "deleted" if deleted else "replaced by another file"
            self.told(f"{lost} was {what} during the run; {self.path} has all of its lines again")
        size = os.fstat(self._descriptor).st_size
        if size < self._size:
            whole = self.content()
            kept = whole[: whole.rfind(b"\n") + 1] if not whole.startswith(b"\0") else b""
            os.ftruncate(self._descriptor, len(kept))
            self.told(
                f"{self.path} was cut short during the run, from {self._size:,} to {size:,} bytes: it lacks results "
                "that the report has, and a resumed run compares these again"
            )
            self._size = len(kept)
            if not kept:
                self._write_bytes(self._first)
        elif size > self._size:
            self.told(f"another process wrote {size - self._size:,} bytes to {self.path} during the run")
            self._size = size
            if not self.content().endswith(b"\n"):
                self._write_bytes(b"\n")

    def _write_bytes(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)


def _leads_to(path: Path, descriptor: int) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


_claims: set[Claim] = set()


def _close_claims() -> None:
    """Close all claimed files in a forked process, which does not use them and would hold their locks."""
    for claim in list(_claims):
        claim.forget()


os.register_at_fork(after_in_child=_close_claims)


@contextmanager
def claimed(path: Path) -> Iterator[Claim]:
    """Claim a file within the context, so that no other process that asks may write to it.

    Raises:
        UserError: if another process has claimed it, or if it cannot be written to.
    """
    try:
        claim = Claim(path)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from None
    try:
        yield claim
    finally:
        claim.close()
