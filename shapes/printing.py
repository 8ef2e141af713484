"""Printing for the command lines: where the reader has gone or the disk is full, no traceback."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


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
