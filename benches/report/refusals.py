"""How the commands on results files end where they cannot go on: one line on stderr, and exit code 4."""

from __future__ import annotations

import sys

from shapes.commands import USAGE_ERROR


def refuse(subject: object, reason: Exception | str) -> int:
    """Say why a file, or a command, is of no use; returns the exit code, 4."""
    said = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
    print(f"{subject}: {str(said).removeprefix(f'{subject}: ')}", file=sys.stderr)
    return USAGE_ERROR


def in_words(error: Exception) -> str:
    """What was wrong with the files that a command was given, in one line."""
    if isinstance(error, OSError):
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part)  # writing may name no file
    if isinstance(error, ValueError):
        return " ".join(str(error).split())
    return f"not a usable results file ({type(error).__name__}: {error})"
