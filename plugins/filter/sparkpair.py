"""Thin filters: the ranks' command lines for units and for the dry run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# On the controller, Ansible finds module_utils for modules only.
sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from sparkpair import ranks


def rank_command(serving: Mapping[str, Any], rank: int, extra: Sequence[str] = ()) -> list[str]:
    """The lines of a rank's `docker run`; see `ranks.docker_command`."""
    try:
        return [
            " ".join(group) for group in ranks.docker_command(ranks.Serving.of(serving), int(rank), extra)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"sparkpair.rank_command: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"sparkpair_rank_command": rank_command}
