"""What the user typed: wrong values fail with what was found, what is allowed, and an example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sparkpair import inputs

PROJECT = Path(__file__).resolve().parents[2]
PROFILES = {"dsv41-1017": {}, "dsv41": {}}
GOOD: dict[str, Any] = {
    "model": "dsv41-1017",
    "ablit": False,
    "served_name": "DeepSeek-V4.1-Flash-1017",
    "context": 1048576,
    "parallel": 4,
    "drafts": True,
    "thinking": True,
    "max_tokens": 32768,
    "temperature": 1.0,
    "top_p": 0.95,
    "top_k": 20,
    "api_host": "0.0.0.0",
    "api_port": 8888,
    "api_key": "auto",
    "rails": 2,
    "mtu": 9000,
    "worker_weights": "slice",
    "hf_endpoint": "https://huggingface.co",
    "has_token": False,
    "allow_lan_copy": False,
    "wait_timeout": 1800,
    "stop_timeout": 30,
    "log_keep": 10,
}
TWO = {"pair": ["spark-a", "spark-b"], "head": ["spark-a"], "worker": ["spark-b"]}
ADDRESSES = {"spark-a": {"ansible_host": "192.0.2.1"}, "spark-b": {"ansible_host": "192.0.2.2"}}


def codes(problems: list[Any]) -> list[str]:
    return [problem.code for problem in problems]


def test_the_shipped_knobs_are_sound() -> None:
    shipped = yaml.safe_load((PROJECT / "group_vars/all/knobs.yml").read_text())
    shipped["thinking"], shipped["has_token"] = True, False
    assert inputs.check_knobs(shipped, PROFILES) == []


def test_every_knob_with_a_rule_is_shipped_with_a_default() -> None:
    shipped = yaml.safe_load((PROJECT / "group_vars/all/knobs.yml").read_text())
    assert set(inputs.knob_rules(PROFILES)) <= set(shipped)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context", 2000000),
        ("context", "abc"),
        ("context", True),
        ("context", "1.5"),
        ("context", None),
        ("parallel", 9),
        ("parallel", "0"),
        ("model", "llama"),
        ("api_port", 70000),
        ("temperature", "hot"),
        ("top_p", 0),
        ("drafts", "perhaps"),
        ("worker_weights", "none"),
        ("rails", 3),
        ("served_name", "two words"),
        ("served_name", "$(reboot)"),
        ("api_host", "spark-a.local"),
        ("api_key", "malformed"),
        ("hf_endpoint", "huggingface.co"),
        ("site_environment", "foo"),
        ("site_environment", {"PORT": 1}),
    ],
)
def test_a_wrong_value_is_told_with_its_name_and_an_example(name: str, value: Any) -> None:
    problems = inputs.check_knobs({**GOOD, name: value}, PROFILES)
    assert codes(problems) == [f"knob-{name.replace('_', '-')}"]
    assert name in problems[0].found
    assert problems[0].needed and problems[0].do


@pytest.mark.parametrize(
    ("name", "value"),
    [("context", "524288"), ("drafts", "yes"), ("drafts", "False"), ("top_k", "0"), ("temperature", "0")],
)
def test_values_of_the_command_line_arrive_as_text_and_are_taken(name: str, value: str) -> None:
    """Field report 71: `-e flag=false` is text."""
    assert inputs.check_knobs({**GOOD, name: value}, PROFILES) == []


def test_a_reply_as_long_as_the_window_is_refused() -> None:
    assert codes(inputs.check_knobs({**GOOD, "context": 8192}, PROFILES)) == ["knob-max-tokens"]


def test_the_overlay_without_a_token_is_refused_before_any_download() -> None:
    """Field report 40."""
    assert codes(inputs.check_knobs({**GOOD, "ablit": "true"}, PROFILES)) == ["token-missing"]


def test_a_token_with_a_newline_is_refused_and_not_shown() -> None:
    problems = inputs.check_knobs({**GOOD, "has_token": True, "token_sound": False}, PROFILES)
    assert codes(problems) == ["token-form"]


def test_all_that_is_wrong_is_told_at_once() -> None:
    problems = inputs.check_knobs({**GOOD, "context": "abc", "parallel": 9}, PROFILES)
    combined = inputs.report(problems)
    assert combined is not None
    assert "context='abc'" in combined.found
    assert "parallel=9" in combined.found


def test_a_pair_of_two_hosts_is_fine() -> None:
    assert inputs.check_inventory(TWO, ADDRESSES) == []


@pytest.mark.parametrize(
    ("groups", "code"),
    [
        ({"head": ["a", "b"], "worker": ["c"]}, "inventory-head"),
        ({"head": ["a"], "worker": []}, "inventory-worker"),
        ({"head": ["a"]}, "inventory-worker"),
        ({}, "inventory-head"),
    ],
)
def test_two_heads_or_no_worker_are_told_apart(groups: dict[str, list[str]], code: str) -> None:
    """Field report 16."""
    assert code in codes(inputs.check_inventory(groups, {}))


@pytest.mark.parametrize(
    ("hosts", "code"),
    [
        (
            {"spark-a": {"ansible_host": "CHANGE-ME"}, "spark-b": {"ansible_host": "192.0.2.2"}},
            "inventory-placeholder",
        ),
        (
            {"spark-a": {"ansible_host": "127.0.0.1"}, "spark-b": {"ansible_host": "192.0.2.2"}},
            "inventory-loopback",
        ),
        (
            {"spark-a": {"ansible_host": "192.0.2.2"}, "spark-b": {"ansible_host": "192.0.2.2"}},
            "inventory-same-host",
        ),
        ({**ADDRESSES, "spark-b": {"ansible_connection": "local"}}, "inventory-local"),
        (
            {**ADDRESSES, "spark-b": {"ansible_host": "192.0.2.2", "link_address": "169.254.3.4"}},
            "inventory-link-local",
        ),
        ({**ADDRESSES, "spark-b": {"ansible_host": "localhost"}}, "inventory-loopback"),
    ],
)
def test_an_address_that_can_not_work_is_named(hosts: dict[str, Any], code: str) -> None:
    """Field reports 15 and 16."""
    assert codes(inputs.check_inventory(TWO, hosts)) == [code]


def test_the_head_may_be_the_controller() -> None:
    hosts = {"spark-a": {"ansible_connection": "local"}, "spark-b": {"ansible_host": "192.0.2.2"}}
    assert inputs.check_inventory(TWO, hosts) == []


def test_a_limit_to_one_host_is_refused_where_the_pair_matters() -> None:
    assert codes(inputs.check_limit(["a", "b"], ["a"], ["all"])) == ["limit"]
    assert codes(inputs.check_limit(["a", "b"], ["a"], ["preflight", "ranks"])) == ["limit"]
    assert inputs.check_limit(["a", "b"], ["a"], ["preflight"]) == []
    assert inputs.check_limit(["a", "b"], ["a", "b", "localhost"], ["all"]) == []
