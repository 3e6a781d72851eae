"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cofire.errors import BusyError, FileError

logger = logging.getLogger("cofire")


@contextmanager
def alone_in(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Inside the block no other process that asks is in ``folder``, which is made if need be.

    The folder itself is locked: the lock ends with the process, however that ends. A folder that was made here and is
    still empty in the end is not left behind.

    Args:
        wait: until another process has left; else that raises.

    Raises:
        BusyError: another process is there.
        FileError: the folder cannot be made.
    """
    made = not folder.exists()
    handle = _locked(folder, wait)
    try:
        yield
    finally:
        if made:
            with suppress(OSError):  # it holds something
                folder.rmdir()
        os.close(handle)


def _locked(folder: Path, wait: bool) -> int:
    """A handle on the folder that holds its lock."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise FileError(f"{folder} cannot be written: {error}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                raise BusyError(
                    f"{folder} is in use by another process; wait until it has ended, or choose another folder"
                ) from None
            logger.warning("%s cannot be locked (%s): see that no other process writes there", folder, error)
        except BaseException:  # Ctrl-C while waiting
            os.close(handle)
            raise
        if is_at(folder, handle):
            return handle
        os.close(handle)  # who was here before has removed it


def is_at(path: Path, handle: int) -> bool:
    """Whether a handle is of what has this name now."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
