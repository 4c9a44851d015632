"""Thin filters of role fixtures: who needs what, by the states that the nodes told."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# On the controller, Ansible finds module_utils for modules only.
sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from sparkpair import fixtures


def fixtures_plan(
    peers: Sequence[Mapping[str, Any]], hostvars: Mapping[str, Mapping[str, Any]], head: str, sliced: bool
) -> dict[str, list[Mapping[str, Any]]]:
    """{"share": peers, "cache": peers} out of `peers` (each with host), rank added; see `fixtures.plan`."""
    states = {peer["host"]: hostvars[peer["host"]]["__fixtures_state"] for peer in peers}
    hosts = fixtures.plan(hostvars[head]["__fixtures_state"], states, sliced=sliced)
    ranked = [{**peer, "rank": states[peer["host"]]["rank"]} for peer in peers]
    return {what: [peer for peer in ranked if peer["host"] in names] for what, names in hosts.items()}


def input_words(inputs: Mapping[str, Any]) -> list[str]:
    """What a rank cache is made from, as words of `sparkpair rank-cache`."""
    return [word for name, value in sorted(inputs.items()) for word in ("--input", f"{name}={value}")]


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"sparkpair_fixtures_plan": fixtures_plan, "sparkpair_input_words": input_words}
