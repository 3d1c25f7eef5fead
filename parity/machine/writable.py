"""Whether files can be written where they are to go: asked before hours of work, and not after them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from parity.user_error import UserError


def check_folder(folder: Path, option: str) -> None:
    """Make sure that files can be put into the folder, which need not be there yet; leaves nothing behind.

    Args:
        folder: of the files.
        option: by which the user names it, for the message.

    Raises:
        UserError: if it is a file, lies below one, or cannot be made or written to.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        below = "" if existing == folder else f", which lies below {existing}"
        raise UserError(f"{option} is {folder}{below}: that is a file, but a folder is due")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".parity-", dir=existing))
    except OSError as error:
        raise UserError(f"{option} is {folder}, but {existing} cannot be written to: {_why(error)}") from None


def check_file(file: Path, option: str) -> None:
    """Make sure that the file can be written, be it there already or not.

    Args:
        file: to be written; its folder is made if need be.
        option: by which the user names it, or its folder, for the message.

    Raises:
        UserError: as ``check_folder``, and if there is a folder or a protected file in its place, or no file can have
            its name.
    """
    check_folder(file.absolute().parent, option)
    try:
        file.lstat()
    except FileNotFoundError:
        return
    except OSError as error:  # as where the name is too long
        raise UserError(f"{option}: {file} cannot be written: {error.strerror}") from None
    if file.is_dir():
        raise UserError(f"{option}: {file} is a folder, but a file is due")
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"{option}: {file} is write-protected")


def _why(error: OSError) -> str:
    # Where no file can be made at all, as in /proc, Linux says that the new one does not exist.
    return "no file can be made there" if isinstance(error, FileNotFoundError) else str(error.strerror)
