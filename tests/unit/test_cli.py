"""The command's manners: exit codes, one JSON object, no traceback (contracts C6 and C8)."""

from __future__ import annotations

import argparse
import json
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sparkpair import cli, commands

SPARKPAIR = str(Path(sys.executable).with_name("sparkpair"))


def run(*words: str, stdout: str | None = None) -> subprocess.CompletedProcess[str]:
    if stdout is None:
        return subprocess.run([SPARKPAIR, *words], capture_output=True, text=True, check=False)
    with Path(stdout).open("w") as out:
        return subprocess.run([SPARKPAIR, *words], stdout=out, stderr=subprocess.PIPE, text=True, check=False)


def test_wrong_usage_is_2() -> None:
    assert run().returncode == 2
    assert run("rope").returncode == 2


def test_wrong_usage_is_one_json_object_too() -> None:
    done = run("rope", "--json")
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert told["ok"] is False
    assert told["problems"][0]["code"] == "usage"


def test_a_problem_is_1_and_told_in_three_parts() -> None:
    done = run("verify", "--lock", "/nowhere.json", "--dir", "/nowhere", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    assert all(word in done.stderr for word in ("found", "needed:", "do:"))


@pytest.mark.parametrize(
    "words", [["verify", "--lock", "/nowhere", "--dir", "/nowhere", "--json"], ["--version"]]
)
def test_a_full_disk_behind_stdout_gives_no_traceback(words: list[str]) -> None:
    done = run(*words, stdout="/dev/full")
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_130_and_still_one_object(tmp_path: Path) -> None:
    fifo = tmp_path / "lock.json"
    subprocess.run(["mkfifo", str(fifo)], check=True)
    words = [SPARKPAIR, "verify", "--lock", str(fifo), "--dir", str(tmp_path), "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)  # it waits for the fifo's other end
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130, err
    assert json.loads(out)["problems"][0]["code"] == "interrupted"
    assert "Traceback" not in err


def test_a_command_loads_its_own_part_of_the_library_alone() -> None:
    """The peer starts one of these for every parcel of a copy."""
    code = (
        "import sys; from sparkpair.cli import main; main(['verify', '--lock', '/no', '--dir', '/no']);"
        "print([name for name in ('rope', 'image', 'link', 'fetch') if f'sparkpair.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(found.name for found in pkgutil.iter_modules(commands.__path__)))
def test_each_command_is_what_its_file_is_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = name.replace("_", "-")
    with pytest.raises(SystemExit) as ended:
        cli.build_parser(command).parse_args([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: sparkpair {command} ")


def test_the_help_lists_every_command() -> None:
    shown = run("--help").stdout
    names = [found.name.replace("_", "-") for found in pkgutil.iter_modules(commands.__path__)]
    assert all(f"    {name} " in shown or f"    {name}\n" in shown for name in names)


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize(
    ("words", "code"), [(["verify", "--lock", "/no", "--dir", "/no", "--json"], 1), (["rope", "--json"], 2)]
)
def test_a_stderr_that_takes_nothing_leaves_one_object_and_the_exit_code(
    words: list[str], code: int, stderr: str
) -> None:
    shell = ["sh", "-c", f'exec "$0" "$@" {stderr}', SPARKPAIR, *words]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert json.loads(done.stdout)["ok"] is False


def test_a_closed_stdout_gives_no_traceback() -> None:
    words = ["sh", "-c", 'exec "$0" "$@" >&-', SPARKPAIR, "verify", "--lock", "/no", "--dir", "/no", "--json"]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "found" in done.stderr


def test_no_option_may_be_abbreviated() -> None:
    """An abbreviated --json was obeyed by the subcommand, yet a problem printed nothing on stdout."""
    done = run("verify", "--lock", "/no", "--dir", "/no", "--js")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--js" in done.stderr


@pytest.mark.parametrize("name", sorted(found.name for found in pkgutil.iter_modules(commands.__path__)))
def test_every_parser_refuses_abbreviations(name: str) -> None:
    def all_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
        below = [
            each
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for each in action.choices.values()
        ]
        return [parser, *(deeper for each in below for deeper in all_of(each))]

    parsers = all_of(cli.build_parser(name.replace("_", "-")))
    assert len(parsers) > 1
    assert not any(parser.allow_abbrev for parser in parsers)


@pytest.mark.parametrize(
    "words",
    [
        ["lock", "acme/model", "--out", ""],
        ["fetch", "--lock", "lock.json", "--to", ""],
        ["verify", "--lock", "lock.json", "--dir", " "],
        ["fetch", "--lock=", "--to", "."],
    ],
)
def test_an_empty_path_is_not_the_current_folder(words: list[str]) -> None:
    done = run(*words, "--json")
    assert done.returncode == 2
    assert "the path is empty" in json.loads(done.stdout)["problems"][0]["found"]


def test_the_command_is_ready_for_an_interrupt_before_it_loads_anything_large() -> None:
    """A ^C while it loaded its parser ended in a traceback."""
    code = (
        "import os, sys; before = set(sys.modules); import sparkpair.cli; new = set(sys.modules) - before;"
        "print(sorted(name for name in new if not name.startswith('sparkpair') and name != '__future__'))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(cli.__file__).parents[1])},
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("slow", ["argparse", "json", "sparkpair.console", "sparkpair.commands.verify"])
def test_an_interrupt_while_it_loads_is_130_and_one_object(slow: str) -> None:
    code = f"""
import sys, sparkpair.cli
class Interrupted:
    def find_spec(self, name, *_):
        if name == {slow!r}:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
for name in [{slow!r}, "json"]:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Interrupted())
sys.exit(sparkpair.cli.main(["verify", "--lock", "/no", "--dir", "/no", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["problems"][0]["code"] == "interrupted"
    assert "Traceback" not in done.stderr
