"""What the command lines share: wrong arguments, printing, and files that are written whole or not at all."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shapes.commands import print_text, write_text

ROOT = Path(__file__).parents[2]
COMMANDS = ["gate", "baseline", "noise", "journal", "report", "calibrate", "prediction"]
MODULES = ["shapes", "correctness.emulate", *(f"benches.{name}" for name in COMMANDS)]


@pytest.mark.parametrize("module", MODULES)
def test_wrong_arguments_are_one_line_and_exit_code_4(module: str) -> None:
    """Of every command."""
    done = subprocess.run([sys.executable, "-m", module, "--unheard-of"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)
    assert done.stderr.startswith(f"python -m {module}: error: ")


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII terminal, and a model whose name has an accent."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert print_text("modèle") == 0
    assert raw.getvalue() == b"mod\\xe8le" + os.linesep.encode()


class TestWriting:
    """write_text(path, text, inputs)."""

    def test_the_text_is_in_the_file_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        """Whether it was there or not."""
        for text in ("one", "two"):
            write_text(tmp_path / "file", text)
            assert [path.read_text() for path in tmp_path.iterdir()] == [text]

    def test_a_link_stays_one(self, tmp_path: Path) -> None:
        """What it names is written."""
        (tmp_path / "file").write_text("old")
        (tmp_path / "link").symlink_to("file")
        write_text(tmp_path / "link", "new")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_text() == "new"

    def test_a_full_disk_leaves_what_was_there(self, tmp_path: Path) -> None:
        """The process may write a thousand bytes, and the text has two thousand."""
        path = tmp_path / "file"
        path.write_text("old")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as error:
                write_text(path, "x" * 2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error.value.filename == str(path)
        assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
    def test_a_device_is_written_to_and_named(self) -> None:
        """Nothing is made beside it."""
        with pytest.raises(OSError, match="No space left on device") as error:
            write_text(Path("/dev/full"), "text")
        assert error.value.filename == "/dev/full"

    def test_what_was_read_is_not_overwritten(self, tmp_path: Path) -> None:
        """By whatever name it goes."""
        (tmp_path / "in.json").write_text("old")
        with pytest.raises(ValueError, match="is one of the files that are read"):
            write_text(tmp_path / ".." / tmp_path.name / "in.json", "new", [tmp_path / "in.json"])
        assert (tmp_path / "in.json").read_text() == "old"
