"""One way from the head to the worker: a key that opens one command, known by keys exchanged beforehand.

The worker's service user accepts the head's key from the head's link addresses only, and only for
`sparkpair agent`. The head knows the worker's host keys by way of the playbook's own connection, so that
there is no trust on first use.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import atomic
from .problem import Problem

KEY = Path("/etc/sparkpair/peer_ed25519")
KNOWN_HOSTS = Path("/etc/sparkpair/peer_known_hosts")
_PUBLIC = re.compile(r"(ssh-ed25519|ecdsa-sha2-\S+|ssh-rsa|sk-\S+) ([A-Za-z0-9+/=]+)")


def _account(user: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return None


def _need_account(user: str) -> pwd.struct_passwd:
    account = _account(user)
    if account is None:
        raise Problem(
            found=f"there is no user {user}",
            needed="the service user that role host makes",
            do="ansible-playbook site.yml --tags host,link",
            code="trust-no-user",
        )
    return account


def _own(path: Path, account: pwd.struct_passwd, mode: int) -> bool:
    """Set owner and mode; True if they were others."""
    state = path.stat()
    same = (state.st_uid, state.st_gid, state.st_mode & 0o7777) == (account.pw_uid, account.pw_gid, mode)
    if not same:
        os.chown(path, account.pw_uid, account.pw_gid)
        path.chmod(mode)
    return not same


def _keygen(*words: str) -> str:
    done = subprocess.run(["ssh-keygen", *words], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Problem(
            found=f"ssh-keygen: {done.stderr.strip()[-200:]}",
            needed="a key pair for the way from the head to the worker",
            do="move the named file away and run again; openssh-client must be installed",
            code="trust-keygen",
        )
    return done.stdout


def ensure_key(user: str, path: Path = KEY, *, check_mode: bool = False) -> dict[str, Any]:
    """The head's key pair: made once, owned by `user`, mode 0600.

    Returns {"changed", "public_key"}; the public key is "" in a dry run before there is one.
    """
    public = path.with_name(f"{path.name}.pub")
    if not path.exists():
        if check_mode:
            return {"changed": True, "public_key": ""}
        account = _need_account(user)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".peer-") as name:
            fresh = Path(name) / path.name
            _keygen("-q", "-t", "ed25519", "-N", "", "-C", "sparkpair-head", "-f", str(fresh))
            for file, mode in ((fresh, 0o600), (fresh.with_name(f"{fresh.name}.pub"), 0o644)):
                _own(file, account, mode)
                file.replace(path.with_name(file.name))
        return {"changed": True, "public_key": public.read_text().strip()}
    text = _keygen("-y", "-f", str(path)).strip()
    changed = not public.is_file() or key_of(public.read_text()) != key_of(text)
    account_now = _account(user)
    if check_mode:
        return {"changed": changed, "public_key": text}
    if changed:
        atomic.write_text(public, text + "\n")
    changed |= _own(path, account_now or _need_account(user), 0o600)
    return {"changed": changed, "public_key": text}


def key_of(line: str) -> str:
    """Type and key of a public key line, without options and comment; "" if there is none."""
    match = _PUBLIC.search(line)
    return f"{match[1]} {match[2]}" if match else ""


def door_line(public_key: str, sources: Sequence[str], command: str) -> str:
    """The authorized_keys line: from these addresses, this one command, nothing else."""
    key = key_of(public_key)
    if not key or not sources or '"' in command:
        raise Problem(
            found=f"key {key[:24]!r}, sources {list(sources)}, command {command!r}",
            needed="a public key, the head's link addresses and a command without double quotes",
            do="ansible-playbook site.yml --tags link",
            code="trust-line",
        )
    return f'restrict,from="{",".join(sources)}",command="{command}" {key} sparkpair-head'


def ensure_door(
    user: str, public_key: str, sources: Sequence[str], command: str, *, check_mode: bool = False
) -> dict[str, Any]:
    """The worker's authorized_keys of the service user: exactly the head's line. Returns {"changed", "diff"}."""
    account = _account(user)
    if check_mode and (account is None or not public_key):
        return {"changed": True}
    account = account or _need_account(user)
    folder = Path(account.pw_dir) / ".ssh"
    path = folder / "authorized_keys"
    text = door_line(public_key, sources, command) + "\n"
    before = path.read_text() if path.is_file() else ""
    changed = before != text
    diff = {"before_header": str(path), "after_header": str(path), "before": before, "after": text}
    if check_mode:
        return {"changed": changed, "diff": diff}
    folder.mkdir(mode=0o700, exist_ok=True)
    changed |= _own(folder, account, 0o700)
    if before != text:
        atomic.write_text(path, text, mode=0o600)
    changed |= _own(path, account, 0o600)
    return {"changed": changed, "diff": diff}


def ensure_known(text: str, path: Path = KNOWN_HOSTS, *, check_mode: bool = False) -> dict[str, Any]:
    """The head's known_hosts for the worker's link addresses. Returns {"changed", "diff"}."""
    before = path.read_text() if path.is_file() else ""
    diff = {"before_header": str(path), "after_header": str(path), "before": before, "after": text}
    changed = before != text
    if changed and not check_mode:
        atomic.write_text(path, text)  # root's, readable by all: the service user has no say in it
    return {"changed": changed, "diff": diff}


def known_hosts(addresses: Sequence[str], keys: Sequence[str], port: int = 22) -> str:
    """known_hosts lines: every host key for every address, in the form that ssh looks for at that port."""
    names = [address if port == 22 else f"[{address}]:{port}" for address in addresses]
    return "".join(f"{','.join(names)} {key}\n" for key in sorted(filter(None, map(key_of, keys))))


def parse_sshd(text: str) -> dict[str, list[str]]:
    """`sshd -T` as keyword -> all its values, in order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword.lower(), []).append(value.strip())
    return found


def sshd_blocks(settings: Mapping[str, Sequence[str]], user: str, groups: Sequence[str]) -> Problem | None:
    """Why sshd's settings would turn the head's key away; None if nothing speaks against it.

    Patterns with a host part (user@host) are taken as fitting: they can't be judged from here.
    """

    def fits(patterns: Sequence[str], names: Sequence[str]) -> bool:
        words = [word.partition("@")[0] for pattern in patterns for word in pattern.split()]
        return any(re.fullmatch(_glob(word), name) for word in words for name in names)

    reasons = []
    if "no" in settings.get("pubkeyauthentication", []):
        reasons.append("PubkeyAuthentication no")
    for keyword, names in (("allowusers", [user]), ("allowgroups", groups)):
        if settings.get(keyword) and not fits(settings[keyword], names):
            reasons.append(f"{keyword} {' '.join(settings[keyword])}")
    for keyword, names in (("denyusers", [user]), ("denygroups", groups)):
        if settings.get(keyword) and fits(settings[keyword], names):
            reasons.append(f"{keyword} {' '.join(settings[keyword])}")
    files = " ".join(settings.get("authorizedkeysfile", [])) or ".ssh/authorized_keys"
    if ".ssh/authorized_keys" not in files:
        reasons.append(f"AuthorizedKeysFile {files}")
    if not reasons:
        return None
    return Problem(
        found=f"sshd turns {user} away: {'; '.join(reasons)}",
        needed=f"key logins for {user} from the head's link addresses",
        do=f"add to /etc/ssh/sshd_config.d/: AllowUsers ... {user} (and PubkeyAuthentication yes), "
        "then systemctl reload ssh",
        code="trust-sshd",
    )


def _glob(word: str) -> str:
    return re.escape(word).replace(r"\*", ".*").replace(r"\?", ".")


def sshd_settings(user: str, source: str) -> dict[str, list[str]]:
    """This machine's sshd as it would treat `user` coming from `source`; empty where it can't be asked."""
    spec = f"user={user},host={source},addr={source}"
    for program in ("/usr/sbin/sshd", "sshd"):
        try:
            done = subprocess.run(
                [program, "-T", "-C", spec], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        return parse_sshd(done.stdout) if done.returncode == 0 else {}
    return {}


def host_keys(settings: Mapping[str, Sequence[str]], folder: Path = Path("/etc/ssh")) -> list[str]:
    """The public host keys that sshd offers. Raises Problem (code trust-host-keys) if there is none."""
    files = [Path(f"{name}.pub") for name in settings.get("hostkey", [])]
    files = files or sorted(folder.glob("ssh_host_*_key.pub"))
    keys = [key for path in files if path.is_file() and (key := key_of(path.read_text(errors="replace")))]
    if not keys:
        raise Problem(
            found=f"no host key of sshd (looked at {', '.join(map(str, files)) or folder})",
            needed="a running OpenSSH server on the worker",
            do="sudo apt-get install openssh-server; sudo ssh-keygen -A",
            code="trust-host-keys",
        )
    return keys


def groups_of(user: str) -> list[str]:
    """Names of a user's groups; empty for one that does not exist."""
    account = _account(user)
    if account is None:
        return []
    import grp

    found = []
    for number in os.getgrouplist(user, account.pw_gid):
        try:
            found.append(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return found


def sshd_port(settings: Mapping[str, Sequence[str]]) -> int:
    """The first port that sshd listens on; 22 where it can't be told."""
    first = (settings.get("port") or ["22"])[0]
    return int(first) if first.isdigit() else 22
