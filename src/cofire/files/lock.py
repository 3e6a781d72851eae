"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cofire.errors import FileError

logger = logging.getLogger("cofire")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside the block no other process that asks is in ``folder``, which is made if need be.

    The folder itself is locked: the lock ends with the process, however that ends. A folder that was made here and is
    still empty in the end is not left behind.

    Raises:
        FileError: another process is there.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FileError(
                    f"{folder} is in use by another process; wait until it has ended, or choose another folder"
                ) from None
            logger.warning("%s cannot be locked (%s): see that no other process writes there", folder, error)
        yield
    finally:
        os.close(handle)
        if made:
            with suppress(OSError):  # it holds something
                folder.rmdir()
