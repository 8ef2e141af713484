"""What the command lines share: wrong arguments, printing and writing, each without a traceback."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

USAGE_ERROR = 4  # pytest's exit code for what it is given but cannot use


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line, and exits with code 4."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """argparse would print the usage, which has every option, before the line."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (--help lists the options)\n")


def print_text(text: str) -> int:
    """Print; the exit code is 0, also for a reader that closes the pipe early, as `head` does, and 1 if it failed."""
    try:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal, and somebody's model has an accent
        print(text, flush=True)
    except BrokenPipeError:
        code = 0
    except OSError as error:
        print(f"cannot print: {error.strerror}", file=sys.stderr)
        code = 1
    else:
        return 0
    # What is still buffered would be flushed at exit and fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def not_writable(path: Path) -> str | None:
    """Why a file cannot be written there, or None; nothing is created."""
    try:
        if path.is_dir():
            return "is a folder"
        if not path.absolute().parent.is_dir():
            return f"there is no folder {path.parent}"
        return None if os.access(path if path.exists() else path.absolute().parent, os.W_OK) else "cannot be written"
    except OSError as error:  # a name too long
        return error.strerror


def write_text(path: Path, text: str, inputs: Iterable[Path] = ()) -> None:
    """Write a file, whole or not at all: on a full disk what was there stays there.

    Raises OSError, with the file's name, and ValueError where it is one of `inputs`, which were read.
    """
    if path.exists() and any(one.exists() and path.samefile(one) for one in inputs):
        raise ValueError(f"{path}: is one of the files that are read")
    whole = path.resolve()  # of a link the file that it names
    part = whole.with_name(f".{whole.name}.part") if whole.is_file() or not whole.exists() else whole
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
        if part != whole:
            part.replace(whole)
    except OSError as error:
        if part != whole:
            with suppress(OSError):
                part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
