"""Progress is told where it can be told, and never stops the work (field reports 40 and 41)."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sparkpair import console
from sparkpair.console import Progress


def worked(snapshot: Path) -> Progress:
    """Ten files' worth of work to its end."""
    progress = Progress("fetch", 100, 10, stream=io.StringIO(), snapshot=snapshot)
    for _ in range(10):
        progress._shown_at -= 60
        progress.advance(10, files=1)
    progress.close()
    return progress


def test_the_snapshot_holds_the_last_state(tmp_path: Path) -> None:
    worked(tmp_path / "progress.json")
    told = json.loads((tmp_path / "progress.json").read_text())
    assert (told["bytes_done"], told["files_done"]) == (100, 10)


def test_a_snapshot_that_cannot_be_written_is_given_up_and_the_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere" / "x", tmp_path / "file" / "x", tmp_path / ("x" * 300), Path("/")):
        progress = worked(path)
        assert progress.done_bytes == 100
        assert progress._snapshot is None


def test_a_snapshot_never_takes_the_place_of_what_is_no_regular_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    pipe, folder, link, dangling = (tmp_path / name for name in ("pipe", "folder", "link", "dangling"))
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(kept)
    dangling.symlink_to(tmp_path / "nowhere")
    before = sorted((path.name, path.lstat().st_ino) for path in tmp_path.iterdir())
    for path in (pipe, folder, link, dangling, Path(os.devnull)):
        assert worked(path)._snapshot is None
    assert sorted((path.name, path.lstat().st_ino) for path in tmp_path.iterdir()) == before
    assert kept.read_text() == "kept"
    assert Path(os.devnull).is_char_device()


def test_the_snapshot_named_by_the_environment_stops_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(console.PROGRESS_FILE, "/nonexist/x")
    Progress("fetch", 1, stream=io.StringIO()).close()


class _Full(io.StringIO):
    tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise OSError(28, "No space left on device")


def test_a_stream_that_cannot_be_written_is_tried_once() -> None:
    stream = _Full()
    progress = Progress("fetch", 100, stream=stream)
    for _ in range(3):
        progress._shown_at -= 60
        progress._line_at = progress._shown_at
        progress.advance(10)
    progress.close()
    assert stream.tries == 1
    assert progress.done_bytes == 30


def test_a_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    Progress("fetch", 100, stream=stream).close()


def test_without_a_stderr_nothing_is_told_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    Progress("fetch", 100).close()
    assert capsys.readouterr().out == ""


CHATTY = (
    "import subprocess, sys; from sparkpair.console import Progress, forgiving_stderr\n"
    "with forgiving_stderr():\n"
    "    print('a remark', file=sys.stderr)\n"
    "    Progress('fetch', 100).close()\n"
    "    data = open(sys.argv[1], 'w')\n"
    "    subprocess.run([sys.executable, '-c', 'import os; os.write(2, b\"of a child\")'])\n"
    "    print('{}')"
)


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-", "2>/dev/null"])
def test_a_stderr_that_takes_nothing_leaves_stdout_and_the_exit_code_alone(
    stderr: str, tmp_path: Path
) -> None:
    shell = f'exec "$0" -c "$1" "$2" {stderr}'
    words = ["sh", "-c", shell, sys.executable, CHATTY, str(tmp_path / "data")]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{}\n")
    assert (tmp_path / "data").read_text() == ""
