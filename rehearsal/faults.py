"""Faults to order while the pair runs: each one happens to the real thing."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from sparkpair.problem import Problem

from . import nodes, rails, world
from .plan import NODES, Node, Plan

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container


def rail(plan: Plan, client: docker.DockerClient, number: int, *, plugged: bool) -> str:
    """Pull or plug the cable of a rail."""
    rails.set_cable(client.containers.get(plan.cable), number, plugged=plugged)
    done = "plugged in" if plugged else "pulled: both nodes lose the carrier"
    return f"rail {number}: cable {done}"


def kill_rank(plan: Plan, client: docker.DockerClient, rank: int, signal: str) -> str:
    """Kill a rank's container in its node's own engine, as a crash would."""
    node = next((node for node in NODES if node.rank == rank), None)
    if node is None:
        raise Problem(
            f"rank {rank}", f"0 to {len(NODES) - 1}", "name a rank that there is", code="no-such-rank"
        )
    container = world.containers(plan, client)[node.name]
    name = f"sparkpair-rank{rank}"
    code, output = nodes.execute(container, "docker", "kill", "--signal", signal, name)
    if code:
        raise Problem(
            found=f"{node.name}: {output.strip()}",
            needed=f"a running container {name}",
            do="start the pair first: ansible-playbook -i inventory/rehearsal.yml site.yml",
            code="no-rank",
        )
    return f"{name} on {node.name}: {signal} sent"


def hub(plan: Plan, order: dict[str, Any]) -> str:
    """Order a fault of the hub: its fields are those of `rehearsal.hub.modes.Rule`."""
    request = urllib.request.Request(
        f"{plan.hub_url}/_rehearsal/mode",
        data=json.dumps({name: value for name, value in order.items() if value is not None}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        # No proxy: the hub is on this machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            rules = json.load(answer)["rules"]
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace").strip()
        raise Problem(
            f"the hub refused: {said}", "a mode that it has", "python -m rehearsal fault hub --help"
        ) from None
    except OSError as error:
        raise Problem(
            f"no hub at {plan.hub_url}: {error}", "a hub that runs", "python -m rehearsal up"
        ) from None
    return f"hub: {json.dumps(rules)}" if rules else "hub: all is well again"


def memory(
    plan: Plan,
    client: docker.DockerClient,
    available_gib: float | None,
    cache_gib: float | None,
    only: str | None,
) -> str:
    """Set the memory that the nodes' fact tree shows; neither value = as it really is."""
    order = {"available_gib": available_gib, "cache_gib": cache_gib}
    text = json.dumps({name: value for name, value in order.items() if value is not None})
    found = world.containers(plan, client)
    chosen = [node for node in NODES if only in (None, node.name)]
    for node in chosen:
        script = f"mkdir -p /run/rehearsal && echo '{text}' >/run/rehearsal/memory.json"
        nodes.must(found[node.name], "sh", "-c", script)
        _wait_for_memory(found[node.name], available_gib)
    return f"memory on {', '.join(node.name for node in chosen)}: {text if text != '{}' else 'as it is'}"


def _wait_for_memory(container: Container, available_gib: float | None) -> None:
    """Wait until the tree shows it, so that what follows sees it."""
    wanted = f"{int((available_gib or 0) * (1 << 20))} kB"
    until = time.monotonic() + 5
    while available_gib is not None and time.monotonic() < until:
        if wanted in nodes.read(container, "grep", "MemAvailable", "/run/spark-tree/proc/meminfo"):
            return
        time.sleep(0.1)
    if available_gib is not None:
        raise Problem(
            found=f"the fact tree of {container.name} does not show {available_gib} GiB",
            needed="spark-tree.service to follow within 5 s",
            do="python -m rehearsal exec NODE journalctl -u spark-tree",
            code="tree-stale",
        )


def reboot(plan: Plan, client: docker.DockerClient, node: Node, *, hard: bool) -> str:
    """Restart a node: cleanly through its systemd, or as by the power button. Its cables come back with it."""
    found = world.containers(plan, client)
    container = found[node.name]
    begun = time.monotonic()
    if hard:
        container.kill()
        container.wait(timeout=30)
        container.start()
    else:
        container.restart(timeout=90)
    rails.attach(client.containers.get(plan.cable), found)
    nodes.wait_until_up(container)
    return f"{node.name} is back after {time.monotonic() - begun:.1f} s"
