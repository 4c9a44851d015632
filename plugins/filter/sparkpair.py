"""Thin filters: the ranks' command lines for units and for the dry run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# On the controller, Ansible finds module_utils for modules only.
sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from sparkpair import image, ranks


def rank_command(serving: Mapping[str, Any], rank: int, extra: Sequence[str] = ()) -> list[str]:
    """The lines of a rank's `docker run`; see `ranks.docker_command`."""
    try:
        return [
            " ".join(group) for group in ranks.docker_command(ranks.Serving.of(serving), int(rank), extra)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"sparkpair.rank_command: {error}") from error


def connections(
    hostvars: Mapping[str, Mapping[str, Any]], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What the inventory says of the way to each host of the pair; see `inputs.check_inventory`."""
    names = ("ansible_host", "ansible_connection", "link_address")
    pair = [*groups.get("head", []), *groups.get("worker", [])]
    return {host: {name: hostvars[host][name] for name in names if name in hostvars[host]} for host in pair}


def image_tag(pins: Mapping[str, str], folder: str, machine: str) -> str:
    """The engine image's name, from its pins and the files it is built from; see `image.content_key`."""
    made_from = image.Pins(**pins, platform=image.platform_of(machine))
    return image.tag_for(image.content_key(image.read_inputs(Path(folder)), made_from))


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "sparkpair_connections": connections,
            "sparkpair_image_tag": image_tag,
            "sparkpair_rank_command": rank_command,
        }
