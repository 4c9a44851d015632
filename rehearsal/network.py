"""The management network: a Docker bridge with a way out for the head."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from typing import TYPE_CHECKING

from sparkpair.problem import Problem

from . import shell
from .docker_engine import Engine
from .plan import Plan, choose_subnet

if TYPE_CHECKING:
    import docker


def with_subnet(plan: Plan, client: docker.DockerClient) -> Plan:
    """The plan with the subnet that this world has already, or with a free one."""
    taken = _routes(plan)
    for network in client.networks.list():
        subnets = _subnets(network.attrs)
        if network.name == plan.network and subnets:
            return dataclasses.replace(plan, subnet=subnets[0])
        taken += subnets
    return dataclasses.replace(plan, subnet=choose_subnet(taken))


def _subnets(attributes: dict[str, object]) -> list[ipaddress.IPv4Network]:
    ipam = attributes.get("IPAM")
    configs = ipam.get("Config") if isinstance(ipam, dict) else None
    given = [config.get("Subnet", "") for config in configs or []]
    return [ipaddress.IPv4Network(subnet) for subnet in given if subnet and ":" not in subnet]


def _routes(plan: Plan) -> list[ipaddress.IPv4Network]:
    """Networks that this machine reaches by a route of its own, this world's bridge left out."""
    found = []
    for route in json.loads(shell.run("ip", "-json", "-4", "route", "show", "table", "all") or "[]"):
        destination = str(route.get("dst", ""))
        if route.get("dev") in {plan.bridge, "lo"} or destination in {"", "default", "0.0.0.0/0"}:
            continue
        found.append(ipaddress.IPv4Network(destination, strict=False))
    return found


def ensure(plan: Plan, client: docker.DockerClient, engine: Engine) -> str:
    """Make the network if it is absent, and the rules that let the nodes out. Returns a word on it."""
    import docker.types

    known = {network.name for network in client.networks.list()}
    if plan.network not in known:
        client.networks.create(
            plan.network,
            driver="bridge",
            labels=plan.labels,
            options={"com.docker.network.bridge.name": plan.bridge},
            ipam=docker.types.IPAMConfig(
                pool_configs=[docker.types.IPAMPool(subnet=str(plan.subnet), gateway=plan.gateway)]
            ),
        )
    if engine.private:
        _let_out(plan)
    _check_local(plan)
    return f"{plan.subnet} on {plan.bridge}"


def _check_local(plan: Plan) -> None:
    addresses = shell.run("ip", "-4", "-brief", "address")
    if f"{plan.gateway}/" not in addresses:
        raise Problem(
            found=f"the network's gateway {plan.gateway} is not an address of this machine",
            needed="a Docker engine on this machine: hub and git server answer on that address",
            do="unset DOCKER_HOST, or run the rehearsal on the machine of that engine",
            code="remote-engine",
        )


def rules(plan: Plan) -> list[list[str]]:
    """The firewall rules of a private engine, each with this world's comment.

    Docker's own are switched off there, as its chains can't be told from another engine's.
    """
    mark = ["-m", "comment", "--comment", plan.network]
    out = ["-s", str(plan.subnet), "!", "-o", plan.bridge]
    back = ["-o", plan.bridge, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
    return [
        ["-t", "nat", "-I", "POSTROUTING", *out, *mark, "-j", "MASQUERADE"],
        ["-t", "filter", "-I", "FORWARD", "-i", plan.bridge, *mark, "-j", "ACCEPT"],
        ["-t", "filter", "-I", "FORWARD", *back, *mark, "-j", "ACCEPT"],
    ]


def _let_out(plan: Plan) -> None:
    saved = shell.run("iptables-save")
    if saved.count(f"--comment {plan.network}") == len(rules(plan)):
        return
    from .leftovers import clear_rules

    clear_rules(plan)
    for rule in rules(plan):
        shell.run("iptables", "-w", *rule)
