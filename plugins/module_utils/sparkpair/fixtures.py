"""What a node holds of all that is made from the checkpoint: by stats and small reads, on a bare node too.

The head makes everything (`make`); any node holds kit, token map and its own rank cache, each with a lock in
the receipts folder by which it was made or received. A worker's copies are right when they are as their locks
say and the locks are the head's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bias, kit, locks, made, modelconfig, rankcache, rope, sealed, tokenmap
from .locks import Lock
from .problem import Problem

MAP_FILE = "token_map.json"
BIAS = "gate_bias_vl.safetensors"


@dataclass(frozen=True)
class Places:
    """Where a node keeps things: fixtures of the profile, kit, rank cache of the variant, locks of them."""

    fixtures: Path
    kit: Path
    cache: Path
    receipts: Path

    @property
    def kit_lock(self) -> Path:
        return self.receipts / "kit.json"

    @property
    def fixtures_lock(self) -> Path:
        return self.receipts / f"fixtures-{self.fixtures.name}.json"

    def cache_lock(self, rank: int) -> Path:
        """The lock of one rank's cache of this variant."""
        return self.receipts / f"rank-cache-{self.cache.name}-rank{rank}.json"


@dataclass(frozen=True)
class Recipe:
    """What the head makes the fixtures from.

    Args:
        model: the checkpoint's folder.
        rope_expect: the recorded rope.json, decoded; empty when nothing is recorded.
        token_map_sha256, bias_sha256: recorded hashes, or empty.
        bias_repo: `REPO@REVISION` where the checkpoint lacks the bias; else empty.
        bias_text: told in the bias file's metadata.
        kit_*: the kit's source.
    """

    model: Path
    rope_expect: Mapping[str, Any]
    token_map_sha256: str
    bias_repo: str
    bias_text: str
    bias_sha256: str
    kit_repository: str
    kit_commit: str
    kit_branch: str
    kit_subfolder: str

    @property
    def unrecorded(self) -> frozenset[str]:
        """The kit's MANIFEST records one bias file; where the profile knows none, that line is another's."""
        return frozenset() if self.bias_sha256 else frozenset({kit.BIAS})


def bias_made_from(model: Path | None, repo: str, text: str, count: int) -> str:
    """The fingerprint of a bias file's inputs: a checkpoint's stats or a repository's name."""
    identity = bias.identity_of(model) if model else repo
    return made.fingerprint({"from": identity, "text": text, "count": count})


def pending_tables(recipe: Recipe, places: Places) -> dict[str, bool]:
    """{"rope", "token_map", "bias"}: whether each has to be made. Raises Problem for a wrong config.json."""
    config_file = recipe.model / "config.json"
    if not config_file.is_file():
        return {"rope": True, "token_map": True, "bias": True}
    config, name = modelconfig.load(config_file), str(config_file)
    expected = rope.summary_of(recipe.rope_expect, "the profile's rope.json") if recipe.rope_expect else None
    counts = tokenmap.expectations(config, name)
    tokenizer = recipe.model / "tokenizer.json"
    token_map = tokenizer.is_file() and tokenmap.standing(
        tokenizer, counts, places.fixtures / MAP_FILE, recipe.token_map_sha256 or None
    )
    source = None if recipe.bias_repo else recipe.model
    made_from = bias_made_from(
        source, recipe.bias_repo, recipe.bias_text, bias.expected_of(config, name).count
    )
    standing = bias.standing(places.fixtures / BIAS, made_from, recipe.bias_sha256 or None)
    return {
        "rope": rope.standing(rope.parameters(config, name), places.fixtures, expected) is None,
        "token_map": not token_map or not places.fixtures_lock.is_file(),
        "bias": standing is None,
    }


def kit_order(recipe: Recipe, places: Places) -> kit.Order:
    """The kit that goes with a recipe."""
    return kit.Order(
        folder=places.kit,
        repository=recipe.kit_repository,
        commit=recipe.kit_commit,
        branch=recipe.kit_branch,
        subfolder=recipe.kit_subfolder,
        fixtures=places.fixtures,
        unrecorded=recipe.unrecorded,
        lock_file=places.kit_lock,
    )


def held(lock_file: Path, folder: Path, *, alone: bool = True) -> tuple[list[str], str]:
    """(What is wrong with a folder by its lock, the lock's key). No lock: wrong, and the key is empty.

    `alone` False leaves other files in the folder out of account.
    """
    try:
        lock = locks.load(lock_file)
    except Problem:
        return [f"{folder} is not there yet"], ""
    found = [item for item in sealed.findings(lock, folder) if alone or item.what != sealed.EXTRA]
    return [str(item) for item in found], key_of(lock_file)


def key_of(lock_file: Path) -> str:
    """Short name of a lock's content, to compare two nodes; empty where there is none."""
    try:
        return key_of_lock(locks.load(lock_file))
    except Problem:
        return ""


def key_of_lock(lock: Lock) -> str:
    """Short name of a lock's content."""
    return hashlib.sha256(locks.dump(lock).encode()).hexdigest()[:16]


def state(places: Places, cache: rankcache.Cache, recipe: Recipe | None) -> dict[str, Any]:
    """All that has to be done on this node, as plain JSON. `recipe` is None on a node that only receives.

    `rope`, `token_map`, `bias`: to be made. `kit`, `fixtures`, `cache`: to be made or received. `renewed`: the
    head will have another kit or token map than before, so that every peer needs it. `message`: reasons.
    `keys`: names of the locks of kit and fixtures, the same on all nodes in the end.
    """
    todo = {"rope": False, "token_map": False, "bias": False, "renewed": False}
    lacking, _ = held(places.fixtures_lock, places.fixtures, alone=False)
    if recipe is not None:
        order = kit_order(recipe, places)
        todo |= pending_tables(recipe, places)
        reasons = kit.pending(order)
        other_map = todo["token_map"] and _map_changes(places, recipe)
        todo["renewed"] = other_map or (bool(reasons) and kit.renewed(order))
    else:
        reasons, _ = held(places.kit_lock, places.kit)
    standing = rankcache.standing(cache)
    todo |= {"kit": bool(reasons), "fixtures": bool(lacking), "cache": standing is None}
    message = [f"{name} is to be made" for name in ("rope", "token_map", "bias") if todo[name]]
    message += [*reasons, *([] if recipe else lacking)]
    message += (
        [f"no cache of rank {cache.rank} for these inputs in {cache.folder}"] if standing is None else []
    )
    keys = {"kit": key_of(places.kit_lock), "fixtures": key_of(places.fixtures_lock)}
    needed = any(todo.values())
    return {"rank": cache.rank, **todo, "needed": needed, "message": message, "keys": keys}


def _map_changes(places: Places, recipe: Recipe) -> bool:
    """Whether a token map that is made anew may be another one: not where the recorded one is locked already."""
    try:
        [entry] = locks.load(places.fixtures_lock).files
    except (Problem, ValueError):
        return True
    return entry.digest != recipe.token_map_sha256


def plan(
    head: Mapping[str, Any], peers: Mapping[str, Mapping[str, Any]], *, sliced: bool
) -> dict[str, list[str]]:
    """Who needs what from the head, by the states of all: {"share": hosts, "cache": hosts}.

    `share`: lacks kit or token map, or holds those of another pin or profile, or will in a moment.
    `cache`: gets its rank cache from the head; nobody does where each node writes its own (not `sliced`).
    """
    share = [
        host
        for host, its in peers.items()
        if head["renewed"] or its["kit"] or its["fixtures"] or its["keys"] != head["keys"]
    ]
    return {"share": share, "cache": [host for host, its in peers.items() if sliced and its["cache"]]}


def known_locks(places: Places) -> dict[str, dict[str, Any] | None]:
    """The locks of kit and fixtures as plain JSON, to hand them to another node."""
    found: dict[str, dict[str, Any] | None] = {}
    for name, path in (("kit", places.kit_lock), ("fixtures", places.fixtures_lock)):
        found[name] = dict(sealed.as_dict(locks.load(path))) if path.is_file() else None
    return found
