"""Files that are written all of it or nothing."""

from __future__ import annotations

import os
import secrets
from os import PathLike
from pathlib import Path


def write_whole(path: str | PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, all of it or nothing; an existing file is replaced.

    Raises `OSError` where the path cannot be written.
    """
    destination = Path(path)
    draft = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(destination)
    except OSError as error:
        # The draft's name means nothing to the caller; the destination does.
        raise type(error)(error.errno, error.strerror, str(destination)) from None
    finally:
        draft.unlink(missing_ok=True)
