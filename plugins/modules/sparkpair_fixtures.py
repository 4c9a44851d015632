#!/usr/bin/python
"""Module sparkpair_fixtures: what a node lacks of tables, kit and rank cache, by stats and small reads."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_fixtures
short_description: Say which fixtures, kit and rank cache a node lacks
description:
  - Looks at everything that is made from the checkpoint. No file of more than 1 MiB is read, nothing is changed.
  - Large files count by their receipts, small files of the kit by their bytes.
  - Fails when a folder holds two caches of one rank, or when the checkpoint's configuration is of another family.
options:
  fixtures:
    description: Folder of the profile's RoPE tables, token map and routing bias.
    type: path
    required: true
  kit:
    description: Folder of the kernel kit.
    type: path
    required: true
  receipts:
    description: Folder with the locks of what was made or received.
    type: path
    required: true
  cache:
    description: Folder of the variant's rank caches.
    type: path
    required: true
  rank:
    description: The node's rank.
    type: int
    required: true
  world:
    description: Number of ranks.
    type: int
    required: true
  inputs:
    description: What the rank cache is made from, names and texts; another text means another cache.
    type: dict
    required: true
  recipe:
    description: What the node makes the fixtures from; without it the node only receives them.
    type: dict
    suboptions:
      model:
        description: The checkpoint's folder.
        type: path
        required: true
      rope_expect:
        description: The recorded rope.json, as decoded JSON.
        type: dict
        default: {}
      token_map_sha256:
        description: The recorded hash of the token map, or empty.
        type: str
        default: ''
      bias_repo:
        description: REPO@REVISION where the checkpoint lacks the routing bias; else empty.
        type: str
        default: ''
      bias_text:
        description: What the bias file tells of its source.
        type: str
        required: true
      bias_sha256:
        description: The recorded hash of the bias file, or empty.
        type: str
        default: ''
      kit_repository:
        description: The kit's git repository.
        type: str
        required: true
      kit_commit:
        description: Its pinned commit.
        type: str
        required: true
      kit_branch:
        description: Where an abbreviated commit is looked for.
        type: str
        default: ''
      kit_subfolder:
        description: Where in the repository the kit is.
        type: str
        default: kit
attributes:
  check_mode:
    description: Changes nothing, and runs in check mode too.
    support: full
  diff_mode:
    description: Has nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Look at what the worker holds
  sparkpair_fixtures:
    fixtures: /var/lib/sparkpair/fixtures/dsv41
    kit: /var/lib/sparkpair/kit
    receipts: /var/lib/sparkpair/receipts
    cache: /var/lib/sparkpair/rank-cache/dsv41-59402086381a
    rank: 1
    world: 2
    inputs: {checkpoint: 64ba41b6c916a587db06eae2e19b7845f7be6e6b, overlay: "", engine: 59402086381a}
"""

RETURN = r"""
needed:
  description: Whether anything at all has to be made or received.
  type: bool
  returned: success
rank:
  description: The node's rank, as it was given.
  type: int
  returned: success
rope:
  description: Whether the RoPE tables have to be made; C(token_map) and C(bias) likewise.
  type: bool
  returned: success
kit:
  description: Whether the kit has to be laid out or received; C(fixtures) and C(cache) likewise.
  type: bool
  returned: success
keys:
  description: Short names of the locks of C(kit) and C(fixtures), the same on all nodes in the end.
  type: dict
  returned: success
locks:
  description: The locks of C(kit) and C(fixtures) as far as they are known.
  type: dict
  returned: success
message:
  description: What is lacking, in words.
  type: list
  elements: str
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import fixtures, rankcache
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    places = fixtures.Places(*(Path(params[name]) for name in ("fixtures", "kit", "cache", "receipts")))
    inputs = {name: str(value) for name, value in params["inputs"].items()}
    rank = params["rank"]
    cache = rankcache.Cache(places.cache, rank, params["world"], inputs, places.cache_lock(rank))
    given = params["recipe"]
    recipe = fixtures.Recipe(**{**given, "model": Path(given["model"])}) if given else None
    return {**fixtures.state(places, cache, recipe), "locks": fixtures.known_locks(places)}


def main() -> None:
    text = {"type": "str", "default": ""}
    recipe = {
        "model": {"type": "path", "required": True},
        "rope_expect": {"type": "dict", "default": {}},
        "token_map_sha256": text,
        "bias_repo": text,
        "bias_text": {"type": "str", "required": True},
        "bias_sha256": text,
        "kit_repository": {"type": "str", "required": True},
        "kit_commit": {"type": "str", "required": True},
        "kit_branch": text,
        "kit_subfolder": {"type": "str", "default": "kit"},
    }
    folder = {"type": "path", "required": True}
    run_module(
        {
            **dict.fromkeys(("fixtures", "kit", "receipts", "cache"), folder),
            "rank": {"type": "int", "required": True},
            "world": {"type": "int", "required": True},
            "inputs": {"type": "dict", "required": True},
            "recipe": {"type": "dict", "options": recipe},
        },
        work,
    )


if __name__ == "__main__":
    main()
