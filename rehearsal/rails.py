"""The two cables between the nodes, and the two cages that hold none.

One container of ours holds them in its own network namespace: each node's port is one end of a veth
pair, its other end lies here, and a bridge per rail joins the two. So nothing of the rails is on the
host, they end with that container, a cable can be pulled (both nodes see the carrier go while their
ports stay switched on), and a user in the docker group can do it all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import nodes
from .plan import NODES, Node, Plan
from .ports import PORTS, RAILS, Port, mac

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

# The ends here never limit a frame: the nodes' own MTUs decide, as on a cable.
CABLE_MTU = 9216


@dataclass(frozen=True)
class End:
    """One port of one node; `here` is the name of the veth end in the cable's namespace."""

    node: Node
    port: Port

    @property
    def here(self) -> str:
        return f"{self.node.name[-1]}-{self.port.rdma}"


ENDS = tuple(End(node, port) for node in NODES for port in PORTS)


def bridge(rail: int) -> str:
    return f"rail{rail}"


def ends_of(rail: int) -> list[End]:
    return [end for end in ENDS if end.port.rail == rail]


def ensure_cable(plan: Plan, client: docker.DockerClient, image: str) -> Container:
    """The container that holds the cables: running, with its bridges."""
    import docker.errors

    try:
        container = client.containers.get(plan.cable)
        if container.status != "running":
            container.remove(force=True)
            raise docker.errors.NotFound("stopped")
    except docker.errors.NotFound:
        container = client.containers.run(
            image,
            ["sleep", "infinity"],
            name=plan.cable,
            labels=plan.labels,
            detach=True,
            init=True,
            network_mode="none",
            pid_mode="host",
            cap_drop=["ALL"],
            cap_add=["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"],
            security_opt=["seccomp=unconfined", "apparmor=unconfined"],
        )
    for rail in range(len(RAILS)):
        if nodes.execute(container, "ip", "link", "show", bridge(rail))[0]:
            _ip(
                container,
                "link",
                "add",
                bridge(rail),
                "mtu",
                str(CABLE_MTU),
                "type",
                "bridge",
                "forward_delay",
                "0",
            )
        _ip(container, "link", "set", bridge(rail), "up")
    return container


def _ip(container: Container, *words: str) -> None:
    nodes.must(container, "ip", *words)


def add_words(end: End, pid: int) -> list[str]:
    """`ip` arguments that make one port in the network namespace of `pid`, and its end here."""
    here = ["link", "add", end.here, "mtu", str(CABLE_MTU), "type", "veth"]
    there = ["peer", "name", end.port.netdev, "address", mac(end.node.rank, end.port), "netns", str(pid)]
    return [*here, *there]


def attach(cable: Container, containers: dict[str, Container]) -> list[str]:
    """Give each node its four ports where they are missing. Returns the ports that were made."""
    made = []
    links = nodes.read(cable, "ls", "/sys/class/net").split()
    for end in ENDS:
        if end.here in links:
            continue
        node = containers[end.node.name]
        node.reload()
        _ip(cable, *add_words(end, int(node.attrs["State"]["Pid"])))
        nodes.must(node, "ip", "link", "set", end.port.netdev, "up")
        if end.port.rail is not None:
            _ip(cable, "link", "set", end.here, "master", bridge(end.port.rail), "up")
        made.append(f"{end.node.name}:{end.port.netdev}")
    return made


def set_cable(cable: Container, rail: int, *, plugged: bool) -> None:
    """Plug or pull the cable of a rail: both nodes see the carrier come or go."""
    for end in ends_of(rail):
        _ip(cable, "link", "set", end.here, "up" if plugged else "down")


def state(cable: Container) -> dict[int, bool]:
    """Whether each rail's cable is plugged at both ends."""
    links = {link["ifname"]: link for link in json.loads(nodes.read(cable, "ip", "-json", "link", "show"))}
    return {
        rail: all("UP" in links.get(end.here, {}).get("flags", []) for end in ends_of(rail))
        for rail in range(len(RAILS))
    }
