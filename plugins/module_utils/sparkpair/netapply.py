"""Putting our netplan file into force, with a way back that needs nobody (field report 12).

The file is tried in a folder of its own first. Then a timer of systemd is set that brings the old state
back, and only the link's ports are configured anew; the management connection is not touched. The
timer is taken off by `confirm`, which runs in a later connection: if that never comes, the node heals itself.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, netplan, probe, sysfs
from .problem import Problem

UNIT = "sparkpair-netplan-revert"
PENDING = Path("/run/sparkpair/netplan-revert")
_LIVE_WAIT_S = 12.0
_MODE = 0o600

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_program(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; a missing one is a result with code 127, not an exception."""
    try:
        return subprocess.run(list(words), capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(list(words), 127, "", f"{words[0]}: not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(list(words), 124, "", f"{words[0]}: no end after 60 s")


@dataclass(frozen=True)
class WantedPort:
    """What must be live on a port: its address "a.b.c.d/p" and MTU in bytes."""

    netdev: str
    address: str
    mtu: int


@dataclass(frozen=True)
class LivePort:
    """What is live on it: addresses, MTU, MAC."""

    addresses: tuple[str, ...] = ()
    mtu: int | None = None
    mac: str = ""


def live_ports() -> dict[str, LivePort]:
    """Every network device of this machine as the kernel has it now."""
    return {
        str(item["ifname"]): LivePort(
            tuple(
                f"{entry['local']}/{entry['prefixlen']}"
                for entry in item.get("addr_info", [])
                if entry.get("family") == "inet"
            ),
            item.get("mtu"),
            str(item.get("address", "")),
        )
        for item in sysfs.ip_json("addr")
        if item.get("ifname")
    }


def differences(wanted: Sequence[WantedPort], live: Mapping[str, LivePort]) -> list[str]:
    """What is not live yet, in words; empty where all is."""
    found = []
    for port in wanted:
        now = live.get(port.netdev)
        if now is None:
            found.append(f"{port.netdev}: no such device")
            continue
        if port.address not in now.addresses:
            found.append(f"{port.netdev}: {', '.join(now.addresses) or 'no address'}, not {port.address}")
        if now.mtu != port.mtu:
            found.append(f"{port.netdev}: MTU {now.mtu}, not {port.mtu}")
    return found


def check_session(address: str | None, wanted: Sequence[WantedPort], live: Mapping[str, LivePort]) -> None:
    """Raise Problem (code link-ssh) if this SSH session comes in over a port that is to be changed."""
    for port in wanted:
        now = live.get(port.netdev, LivePort())
        if address and any(text.partition("/")[0] == address for text in now.addresses):
            raise Problem(
                found=f"this session comes in by {address}, which is on {port.netdev}: a port of the link",
                needed="a management connection that does not run over the ports that are set up",
                do="set ansible_host to the address of the management port (enP7s7 or Wi-Fi)",
                code="link-ssh",
            )


def validate(text: str | None, run: Run = run_program, root: Path = Path("/")) -> None:
    """Let netplan read its files with ours among them, in a folder of its own. Raises Problem on refusal."""
    with tempfile.TemporaryDirectory(prefix="sparkpair-netplan-") as name:
        trial = Path(name)
        files = {**netplan.list_files(root)}
        files.pop(str(netplan.OWN_FILE), None)
        if text:
            files[str(netplan.OWN_FILE)] = text
        for path, content in files.items():
            target = trial / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
            target.chmod(_MODE)
        done = run(["netplan", "generate", "--root-dir", name])
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise Problem(
                found=f"netplan refuses the files: {' / '.join(lines[-4:]).replace(name, '')}",
                needed="netplan.io, and files in /etc/netplan that it can read together with the link's",
                do="sudo netplan generate (shows the same without our file); correct the file that it names",
                code="netplan-refused",
            )


def revert_script(
    own: Path, before: Path | None, wanted: Sequence[WantedPort], live: Mapping[str, LivePort], done: Path
) -> str:
    """A shell script that brings back the old file, addresses and MTUs, and leaves `done` as a mark."""
    lines = ["#!/bin/sh", "# Brings back what was there before sparkpair changed the link.", "set -u"]
    if before:
        lines.append(f"install -m 0600 {shlex.quote(str(before))} {shlex.quote(str(own))}")
    else:
        lines.append(f"rm -f {shlex.quote(str(own))}")
    lines.append("netplan apply")
    for port in wanted:
        now = live.get(port.netdev, LivePort())
        device = shlex.quote(port.netdev)
        if port.address not in now.addresses:
            lines.append(f"ip addr del {shlex.quote(port.address)} dev {device} 2>/dev/null")
        if now.mtu:
            lines.append(f"ip link set {device} mtu {int(now.mtu)}")
        lines += [
            f"ip addr add {shlex.quote(text)} dev {device} 2>/dev/null"
            for text in now.addresses
            if netplan.is_static(text)
        ]
    lines.append(f"touch {shlex.quote(str(done))}")
    return "\n".join(lines) + "\n"


def activate(renderer: str, netdevs: Sequence[str], run: Run = run_program) -> list[str]:
    """Configure only `netdevs` anew by the service that owns them. Returns what failed, empty if nothing."""
    steps: list[list[str]] = [["netplan", "generate"]]
    if renderer == "NetworkManager":
        steps.append(["nmcli", "connection", "reload"])
        steps += [["nmcli", "connection", "up", f"netplan-{netdev}"] for netdev in netdevs]
    else:
        steps += [
            ["systemctl", "start", "systemd-networkd.service"],
            ["networkctl", "reload"],
            ["networkctl", "reconfigure", *netdevs],
        ]
    return _first_failure(steps, run)


def _first_failure(steps: Sequence[Sequence[str]], run: Run) -> list[str]:
    for words in steps:
        done = run(words)
        if done.returncode:
            return [f"{' '.join(words)}: {(done.stderr or done.stdout).strip()[-300:]}"]
    return []


def apply(
    text: str | None,
    wanted: Sequence[WantedPort],
    *,
    renderer: str,
    session: str | None = None,
    revert_after: int = 90,
    check_mode: bool = False,
    run: Run = run_program,
    own_file: Path = netplan.OWN_FILE,
    pending: Path = PENDING,
    live: Callable[[], Mapping[str, LivePort]] = live_ports,
) -> dict[str, Any]:
    """Make our file `text` (None: no file) and have `wanted` live.

    Returns {"changed", "diff", "pending"}; with `pending` True the change goes back by itself after
    `revert_after` seconds unless `confirm` is called. Raises Problem before any change where it can't be made.
    """
    before = own_file.read_text() if own_file.is_file() else None
    now = live()
    gaps = differences(wanted, now)
    if before == text and not gaps:
        return {"changed": False, "pending": _timer_active(run) if pending.exists() else False}
    result = {
        "changed": True,
        "pending": not check_mode,
        "diff": {
            "before_header": str(own_file),
            "after_header": str(own_file),
            "before": (before or "") + "".join(f"# now: {gap}\n" for gap in gaps),
            "after": text or "",
        },
    }
    check_session(session, wanted, now)
    if check_mode:
        return result
    for port in wanted:
        if port.address not in now.get(port.netdev, LivePort()).addresses:
            macs = [item.mac for item in now.values() if item.mac]
            probe.check_free(port.netdev, port.address.partition("/")[0], macs)
    validate(text, run)
    _set_revert(before, wanted, now, seconds=revert_after, run=run, own_file=own_file, pending=pending)
    if text:
        atomic.write_text(own_file, text, mode=_MODE)
    else:
        own_file.unlink(missing_ok=True)
    previous = netplan.own_addresses(before)
    # Ports of an earlier plan too: a cable that moved must not leave its addresses behind.
    netdevs = [port.netdev for port in wanted]
    netdevs += [netdev for netdev in previous if netdev in now and netdev not in netdevs]
    failed = activate(renderer, netdevs, run)
    _drop_previous(previous, wanted, run)
    if failed or _wait_live(wanted, live):
        # The service may not have known the ports before: let netplan do the whole of it.
        failed = _first_failure([["netplan", "apply"]], run)
    gaps = _wait_live(wanted, live)
    if gaps:
        revert_now(run, pending)
        raise Problem(
            found="the link's addresses did not come up: " + "; ".join([*gaps, *failed]),
            needed="each port with its address and MTU; the old state has been brought back",
            do=f"see journalctl -u systemd-networkd -u NetworkManager -n 50 ({renderer} owns the ports here)",
            code="link-apply",
        )
    return result


def _drop_previous(previous: Mapping[str, Sequence[str]], wanted: Sequence[WantedPort], run: Run) -> None:
    """Take addresses of an earlier plan off the ports that no longer have them; most are gone already."""
    keep = {(port.netdev, port.address) for port in wanted}
    for netdev, addresses in previous.items():
        for address in addresses:
            if (netdev, address) not in keep:
                run(["ip", "addr", "del", address, "dev", netdev])


def _wait_live(wanted: Sequence[WantedPort], live: Callable[[], Mapping[str, LivePort]]) -> list[str]:
    deadline = time.monotonic() + _LIVE_WAIT_S
    while True:
        gaps = differences(wanted, live())
        if not gaps or time.monotonic() >= deadline:
            return gaps
        time.sleep(0.3)


def _timer_active(run: Run) -> bool:
    return run(["systemctl", "is-active", "--quiet", f"{UNIT}.timer"]).returncode == 0


def _set_revert(
    before: str | None,
    wanted: Sequence[WantedPort],
    live: Mapping[str, LivePort],
    *,
    seconds: int,
    run: Run,
    own_file: Path,
    pending: Path,
) -> None:
    """Keep the old state and set the timer. An older timer that still runs keeps its older state."""
    script, done = pending / "revert.sh", pending / "reverted"
    if script.exists() and not done.exists() and _timer_active(run):
        run(["systemctl", "stop", f"{UNIT}.timer"])
    else:
        shutil.rmtree(pending, ignore_errors=True)
        pending.mkdir(parents=True, mode=0o700)
        kept = pending / "before.yaml"
        if before is not None:
            atomic.write_text(kept, before, mode=_MODE)
        text = revert_script(own_file, kept if before is not None else None, wanted, live, done)
        atomic.write_text(script, text, mode=0o700)
    run(["systemctl", "reset-failed", f"{UNIT}.service", f"{UNIT}.timer"])
    words = ["systemd-run", f"--unit={UNIT}", f"--on-active={seconds}", "--timer-property=AccuracySec=1s"]
    started = run([*words, "--collect", "/bin/sh", str(script)])
    if started.returncode:
        raise Problem(
            found=f"the timer that would undo the change can't be set: {started.stderr.strip()[-200:]}",
            needed="systemd as the node's first process: nothing is changed without a way back",
            do=f"systemctl status {UNIT}.timer; systemctl is-system-running",
            code="link-no-revert",
        )


def revert_now(run: Run = run_program, pending: Path = PENDING) -> None:
    """Bring the old state back at once."""
    run(["systemctl", "stop", f"{UNIT}.timer"])
    run(["/bin/sh", str(pending / "revert.sh")])


def confirm(*, check_mode: bool = False, run: Run = run_program, pending: Path = PENDING) -> dict[str, Any]:
    """Keep the change: take the timer off. Raises Problem (code link-reverted) if it has run already."""
    if not pending.exists():
        return {"changed": False}
    if check_mode:
        return {"changed": True}
    run(["systemctl", "stop", f"{UNIT}.timer"])
    reverted = (pending / "reverted").exists()
    shutil.rmtree(pending, ignore_errors=True)
    if reverted:
        raise Problem(
            found="this node brought its old network configuration back: nobody confirmed the new one in time",
            needed="a management connection that answers after the change",
            do="see journalctl -n 50 on that node, then run ansible-playbook site.yml --tags link again",
            code="link-reverted",
        )
    return {"changed": True}
