"""Both ranks' units byte for byte as they were last looked at: tests/golden/sparkpair-rank<R>.service.

After a wanted change: `python tests/unit/test_golden_units.py` writes them anew; read the diff before it
is committed. The words are those of the filter that the role uses, over the `Serving` of test_ranks.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from sparkpair import ranks
from test_ranks import SERVING

PROJECT = Path(__file__).resolve().parents[2]
GOLDEN = PROJECT / "tests/golden"
ROLE = PROJECT / "roles/ranks"
RANKS = range(SERVING.world)
LINK_VARIABLE = "${TF_RDMA_DEVICES}"


def command_lines(rank: int) -> list[str]:
    """What `sparkpair_rank_command` gives the role."""
    spec = importlib.util.spec_from_file_location("filters", PROJECT / "plugins/filter/sparkpair.py")
    assert spec and spec.loader
    filters = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(filters)
    command = filters.FilterModule().filters()["sparkpair_rank_command"]
    lines: list[str] = command(dataclasses.asdict(SERVING), rank, defaults()["ranks_docker_extra"])
    return lines


def defaults() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    return values


def rendered(rank: int) -> str:
    # The settings of Ansible's own template module.
    environment = jinja2.Environment(  # noqa: S701 (a unit, not HTML)
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    template = environment.from_string((ROLE / "templates/rank.service.j2").read_text())
    return template.render(
        {
            **defaults(),
            "ansible_managed": "Ansible managed",
            "ranks_rank": rank,
            "ranks_serving": dataclasses.asdict(SERVING),
            "__ranks_command": command_lines(rank),
        }
    )


def golden(rank: int) -> Path:
    return GOLDEN / f"{ranks.name_of(rank)}.service"


def directives(rank: int) -> list[tuple[str, str]]:
    """The unit's settings as systemd reads them: continued lines joined by a space."""
    found = []
    for line in golden(rank).read_text().replace("\\\n", " ").splitlines():
        if line and line[0] not in "#;[":
            name, separator, value = line.partition("=")
            assert separator and re.fullmatch(r"[A-Z][A-Za-z]+", name), line
            found.append((name, value))
    return found


@pytest.mark.parametrize("rank", RANKS)
def test_a_unit_is_what_was_last_looked_at(rank: int) -> None:
    assert rendered(rank).encode() == golden(rank).read_bytes()


def test_there_is_one_unit_a_rank() -> None:
    assert sorted(GOLDEN.glob("*.service")) == [golden(rank) for rank in RANKS]


@pytest.mark.parametrize("rank", RANKS)
def test_each_continued_line_goes_on_in_the_next(rank: int) -> None:
    """A backslash that nothing follows, or that a space does, would cut the command off in the middle."""
    lines = golden(rank).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("ExecStart="))
    end = next(number for number, line in enumerate(lines) if line.startswith("ExecStop="))
    *continued, last = lines[start:end]
    assert len(continued) > 10
    assert all(re.search(r"[^\\\s] \\$", line) for line in continued)
    assert "\\" not in last
    # systemd would take such a line for a comment, one without a space for a new setting.
    assert all(re.match(r"  [^\s#;\[]", line) for line in lines[start + 1 : end])
    assert not any("\\" in line for line in [*lines[:start], *lines[end:]])


@pytest.mark.parametrize("rank", RANKS)
def test_systemd_puts_in_nothing_but_the_links_devices(rank: int) -> None:
    """No specifier (%), no variable ($) and no quote: every other word reaches the engine as written."""
    for name, value in directives(rank):
        assert "%" not in value, name
        words = value.split()
        if (name, rank) == ("ExecStart", 1):
            words.remove(LINK_VARIABLE)
        assert not any(re.search(r"[$'\"\\]", word) for word in words), name


@pytest.mark.parametrize("rank", RANKS)
def test_systemd_runs_the_very_words_of_the_library(rank: int) -> None:
    started = [value.split() for name, value in directives(rank) if name == "ExecStart"]
    assert started == [[word for group in ranks.docker_command(SERVING, rank) for word in group]]


if __name__ == "__main__":
    for each in RANKS:
        golden(each).write_text(rendered(each))
