"""What the world is made of: names, addresses, interfaces. Pure; nothing here touches the machine."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpair.problem import Problem

LABEL = "sparkpair.rehearsal"
PASSWORD = "rehearsal"
PREFERRED_SUBNET = "10.77.0.0/24"
HUB_PORT = 7080
GIT_PORT = 7418
BASE_IMAGE = "nvcr.io/nvidia/pytorch:26.07-py3"

# Addresses that the nodes use themselves: the link plan's rails and the inner engines' docker0.
RESERVED = ("10.20.0.0/15", "172.17.0.0/16")

# Variables of the controller that mean the same in a node: its CA bundle is mounted at the same path.
_PATH_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_URL_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_FIND_LINKS", "PIP_PROXY")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


@dataclass(frozen=True)
class Node:
    """One simulated Spark."""

    name: str
    role: str  # "head" or "worker"
    rank: int
    user: str
    host_part: int  # of the management address
    route_out: bool


NODES = (
    Node("spark-a", "head", 0, "ada", 11, route_out=True),
    Node("spark-b", "worker", 1, "bo", 12, route_out=False),
)


def node_named(name: str) -> Node:
    """The node of that name; a Problem names those that there are."""
    for node in NODES:
        if name in {node.name, node.role}:
            return node
    known = ", ".join(node.name for node in NODES)
    raise Problem(f"no node {name!r}", f"one of: {known}", f"use {NODES[0].name}", code="no-such-node")


@dataclass(frozen=True)
class Plan:
    """The names and places of one world. Two clones on one machine have two of them."""

    root: Path  # the project
    subnet: ipaddress.IPv4Network = field(default=ipaddress.IPv4Network(PREFERRED_SUBNET))

    @property
    def id(self) -> str:
        """Six hex digits of the project's path: the same at each run, another in each clone."""
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:6]

    @property
    def state(self) -> Path:
        return self.root / ".rehearsal"

    @property
    def world_file(self) -> Path:
        return self.state / "world.json"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def key(self) -> Path:
        return self.state / "ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.state / "ssh" / "known_hosts"

    @property
    def bridge(self) -> str:
        """The management bridge on the host; 15 characters are the limit."""
        return f"spr-{self.id}"

    @property
    def network(self) -> str:
        return f"sparkpair-{self.id}"

    @property
    def cable(self) -> str:
        return f"sparkpair-{self.id}-cable"

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL: self.id}

    @property
    def gateway(self) -> str:
        return str(self.subnet.network_address + 1)

    def container(self, node: Node) -> str:
        return f"sparkpair-{self.id}-{node.name}"

    def volume(self, node: Node) -> str:
        return f"sparkpair-{self.id}-{node.name}-docker"

    def address(self, node: Node) -> str:
        return str(self.subnet.network_address + node.host_part)

    @property
    def hub_url(self) -> str:
        return f"http://{self.gateway}:{HUB_PORT}"

    def git_url(self, name: str) -> str:
        return f"git://{self.gateway}:{GIT_PORT}/{name}.git"


def choose_subnet(
    taken: Iterable[ipaddress.IPv4Network], preferred: str = PREFERRED_SUBNET
) -> ipaddress.IPv4Network:
    """The preferred /24, or the next one of 10.77 to 10.99 that overlaps nothing in `taken`."""
    busy = [*taken, *(ipaddress.IPv4Network(network) for network in RESERVED)]
    wanted = ipaddress.IPv4Network(preferred)
    others = (ipaddress.IPv4Network(f"10.{b}.{c}.0/24") for b in range(77, 100) for c in range(256))
    for candidate in (wanted, *others):
        if not any(candidate.overlaps(network) for network in busy):
            return candidate
    raise Problem(
        found="each /24 from 10.77.0.0 to 10.99.255.0 overlaps a network of this machine",
        needed="one free /24 for the management network of the rehearsal",
        do="free one (ip route; docker network ls), then run the same command again",
        code="no-free-subnet",
    )


def site_environment(environment: Mapping[str, str], subnet: ipaddress.IPv4Network) -> dict[str, str]:
    """What of the controller's environment a node needs to reach the same package sources.

    Kept: the CA bundle (a path under /etc/ssl/certs, which the nodes have too), package index URLs and
    proxies, unless they mean this machine alone (a file path, localhost).
    """
    kept: dict[str, str] = {}
    for name in _PATH_VARIABLES:
        if environment.get(name, "").startswith("/etc/ssl/certs/"):
            kept[name] = environment[name]
    for name in (*_URL_VARIABLES, *_PROXY_VARIABLES):
        value = environment.get(name, "")
        if value and not value.startswith(("/", "file:", ".")) and not _is_local(value):
            kept[name] = value
    if any(name in kept for name in _PROXY_VARIABLES):
        given = environment.get("no_proxy", environment.get("NO_PROXY", ""))
        kept["no_proxy"] = ",".join(filter(None, (given, str(subnet), "localhost,127.0.0.1")))
        kept["NO_PROXY"] = kept["no_proxy"]
    return kept


def _is_local(value: str) -> bool:
    return any(name in value for name in ("localhost", "127.0.0.1", "[::1]"))


def world_json(
    plan: Plan, docker_host: str, commits: Mapping[str, str], site: Mapping[str, str]
) -> dict[str, Any]:
    """The one file that the inventory and the Makefile read."""
    return {
        "id": plan.id,
        "docker_host": docker_host,
        "architecture": platform.machine(),
        "subnet": str(plan.subnet),
        "gateway": plan.gateway,
        "ssh_key": str(plan.key),
        "known_hosts": str(plan.known_hosts),
        "become_password": PASSWORD,
        "nodes": {
            node.name: {
                "address": plan.address(node),
                "user": node.user,
                "role": node.role,
                "rank": node.rank,
                "container": plan.container(node),
            }
            for node in NODES
        },
        "hub_url": plan.hub_url,
        "engine_repo": plan.git_url("engine"),
        "engine_commit": commits["engine"],
        "kit_repo": plan.git_url("kit"),
        "kit_commit": commits["kit"],
        "base_image": BASE_IMAGE,
        "site_environment": dict(site),
    }
