"""The docker command: words in, text or JSON out, and its errors told apart with one remedy each.

The command, not an SDK: it is on every Spark, and it is what a person types to look for himself
(field report 76).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .problem import Problem

_SHORT_S = 120
_LAST_LINES = 20
# Where a containerd that is not the engine's own keeps images; `docker info` does not say it.
_CONTAINERD_ROOT = Path("/var/lib/containerd")


@dataclass(frozen=True)
class _Fault:
    """One kind of error: how its text is recognised, what is needed, the one remedy."""

    code: str
    pattern: re.Pattern[str]
    needed: str
    do: str


def _fault(code: str, pattern: str, needed: str, do: str) -> _Fault:
    return _Fault(code, re.compile(pattern, re.IGNORECASE), needed, do)


# In this order: the first that matches is told.
_FAULTS = (
    _fault(
        "docker-permission",
        r"permission denied while trying to connect to the docker",
        "a user that may use Docker: root, or a member of the group docker since before its login",
        "run it with sudo; or sudo usermod -aG docker $USER, then log out and in again",
    ),
    _fault(
        "docker-down",
        r"cannot connect to the docker daemon|failed to connect to the docker api|error during connect"
        r"|is the docker daemon running|docker daemon is not running",
        "a running Docker engine",
        "sudo systemctl enable --now docker (and if it does not stay up: journalctl -u docker -n 50)",
    ),
    _fault(
        "disk-full",
        r"no space left on device|disk quota exceeded|not enough space",
        "room under Docker's data root",
        "sparkpair image prune --keep TAG --yes removes superseded images of ours; "
        "then df -h $(docker info --format '{{.DockerRootDir}}')",
    ),
    _fault(
        "nvidia-runtime",
        r"unknown or invalid runtime name: nvidia|unknown runtime specified nvidia"
        r"|could not select device driver .*gpu",
        "the NVIDIA runtime known to Docker",
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    ),
    _fault(
        "nvidia-cdi",
        r"unresolvable cdi devices",
        "a CDI description that fits the driver that is loaded",
        "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    ),
    _fault(
        "nvidia-device",
        r"nvidia-container-cli: .*(initialization error|driver not loaded|no devices|initialize nvml)"
        r"|driver/library version mismatch",
        "a GPU whose driver is loaded and of the same version as its libraries",
        "nvidia-smi shows the state; after a driver update: sudo reboot",
    ),
    _fault(
        "image-incomplete",
        r"(blob|content digest|content) .*(does not exist|not found)|unable to (find|create manifest).* blob",
        "an archive of one platform, whole",
        "update Docker to 28 or newer (docker save --platform), or turn its containerd image store off",
    ),
    _fault(
        "image-missing",
        r"no such image|reference does not exist|unable to find image",
        "the image on this node",
        "ansible-playbook site.yml --tags image",
    ),
    _fault(
        "image-in-use",
        r"image is being used by|image has dependent child images|image is referenced in",
        "an image that no container was made from",
        "docker ps -a shows the container; remove it first: docker rm NAME",
    ),
    _fault(
        "container-name",
        r"container name .* is already in use",
        "the container's name free",
        "docker ps -a shows who has it; stop the pair with ansible-playbook stop.yml",
    ),
    _fault(
        "registry-unknown",
        r"manifest unknown|manifest for .* not found|no matching manifest for|HTTP 404",
        "an image of this name and digest for this processor in the registry",
        "compare base_image with the registry's page, correct it in inventory/group_vars/pair/",
    ),
    _fault(
        "registry-denied",
        r"pull access denied|unauthorized|requested access to the resource is denied|toomanyrequests"
        r"|no basic auth credentials",
        "a registry that hands this image out to this machine",
        "log in to it as root: sudo docker login REGISTRY; with a rate limit, wait and run again",
    ),
    _fault(
        "registry-certificate",
        r"x509|certificate signed by unknown authority",
        "a certificate that this machine trusts",
        "add the site's CA: sudo cp CA.crt /usr/local/share/ca-certificates/ && "
        "sudo update-ca-certificates && sudo systemctl restart docker",
    ),
    _fault(
        "registry-unreachable",
        r"dial tcp|i/o timeout|tls handshake timeout|no such host|request canceled while waiting"
        r"|context deadline exceeded|unexpected eof|connection reset by peer|net/http|proxyconnect",
        "a way from this machine to the image's registry",
        "check the network, or the engine's proxy (systemctl edit docker), then run the same again",
    ),
)
# Worth another try: the network, not the request, was at fault.
PASSING = frozenset({"registry-unreachable"})


def classify(output: str, doing: str) -> Problem:
    """A failed docker command's output as the one Problem that fits it.

    Args:
        output: stderr (or both streams), as the command printed it.
        doing: the command in short, for the message ("docker save TAG").
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for fault in _FAULTS:
        hit = next((line for line in lines if fault.pattern.search(line)), None)
        if hit:
            return Problem(f"{doing}: {hit}", fault.needed, fault.do, code=fault.code)
    said = " | ".join(lines[-_LAST_LINES:]) or "no output"
    return Problem(
        found=f"{doing} failed: {said}",
        needed="that command to succeed",
        do="run it by hand; the engine's own log is journalctl -u docker -n 50",
        code="docker-failed",
    )


def missing() -> Problem:
    """No docker command on PATH."""
    return Problem(
        found="no docker command on this machine",
        needed="the Docker engine that DGX OS brings",
        do="sudo apt-get install docker.io",
        code="docker-missing",
    )


@dataclass(frozen=True)
class Docker:
    """The docker command of one engine.

    Args:
        host: the engine's address (`unix:///path`); empty for the machine's own.
        program: the command.
    """

    host: str = ""
    program: str = "docker"

    def argv(self, *words: str) -> list[str]:
        return [self.program, *(["--host", self.host] if self.host else []), *words]

    def environment(self) -> dict[str, str]:
        """English, plain progress, the engine's own builder and no attestations.

        Attestations would make the image an index of several manifests, which an older engine can't
        load from an archive (field report 30).
        """
        return {
            **os.environ,
            "LC_ALL": "C.UTF-8",
            "DOCKER_CLI_HINTS": "false",
            "BUILDKIT_PROGRESS": "plain",
            "BUILDX_BUILDER": "default",
            "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
        }

    def run(self, *words: str, timeout: float = _SHORT_S) -> str:
        """Stdout of a short command. Raises Problem for whatever stopped it."""
        doing = f"docker {' '.join(words[:2])}"
        try:
            done = subprocess.run(
                self.argv(*words),
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=timeout,
                env=self.environment(),
            )
        except FileNotFoundError:
            raise missing() from None
        except subprocess.TimeoutExpired:
            raise Problem(
                found=f"{doing} gave no answer within {timeout:.0f} s",
                needed="a Docker engine that answers",
                do="sudo systemctl restart docker (it stops running containers)",
                code="docker-hangs",
            ) from None
        if done.returncode != 0:
            raise classify(done.stderr or done.stdout, doing)
        return done.stdout

    def inspect(self, reference: str) -> dict[str, Any] | None:
        """`docker image inspect` of one image; None where this engine has none of that name."""
        try:
            found = json.loads(self.run("image", "inspect", reference))
        except Problem as problem:
            if problem.code == "image-missing":
                return None
            raise
        return dict(found[0])

    def info(self) -> dict[str, Any]:
        """`docker info` as JSON. Raises Problem also where the command itself succeeds without an engine."""
        found: dict[str, Any] = json.loads(self.run("info", "--format", "{{json .}}"))
        if found.get("ServerErrors"):
            raise classify("\n".join(found["ServerErrors"]), "docker info")
        return found

    def can_save_one_platform(self) -> bool:
        """Whether both the command and the engine know `docker save --platform` (API 1.48, Docker 28)."""
        try:
            told = json.loads(self.run("version", "--format", "{{json .}}"))
        except (Problem, ValueError):
            return False
        sides = (told.get("Client") or {}, told.get("Server") or {})
        return all(_api(side.get("ApiVersion", "")) >= (1, 48) for side in sides)


def _api(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)) or (0,)


def storage_roots(info: Mapping[str, Any], containerd_root: Path = _CONTAINERD_ROOT) -> list[Path]:
    """The folders that images really lie in (field report 36).

    The data root, and with the containerd image store, which keeps a packed and an unpacked copy, also
    the root of a system-wide containerd.
    """
    roots = [Path(str(info["DockerRootDir"]))]
    if uses_containerd_store(info) and containerd_root.is_dir():
        roots.append(containerd_root)
    return roots


def uses_containerd_store(info: Mapping[str, Any]) -> bool:
    """Whether images are kept by containerd (ids are manifest digests there, not configuration digests)."""
    return any(
        len(row) == 2 and row[0] == "driver-type" and "snapshotter" in row[1]
        for row in info.get("DriverStatus") or []
    )


def runtimes(info: Mapping[str, Any] | str) -> set[str]:
    """The registered runtimes, from `docker info` as JSON or as the text a person pastes."""
    if isinstance(info, str):
        line = re.search(r"^\s*Runtimes:(.*)$", info, re.MULTILINE)
        return set(line.group(1).split()) if line else set()
    return set(info.get("Runtimes") or {})


def gpu_problem(info: Mapping[str, Any] | str, programs: Iterable[str]) -> Problem | None:
    """Why `docker run --gpus all` would find no GPU, or None (field report 23).

    The flag needs the toolkit's hook on PATH; a registered runtime is another way to the same thing.

    Args:
        info: `docker info`.
        programs: names of programs that were found on PATH.
    """
    if "nvidia" in runtimes(info) or "nvidia-container-runtime-hook" in set(programs):
        return None
    return Problem(
        found="Docker knows no NVIDIA runtime and nvidia-container-runtime-hook is not on PATH",
        needed="the NVIDIA container toolkit that DGX OS brings",
        do="sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
        code="nvidia-runtime",
    )


def plain(line: bytes) -> str:
    """A line as it is read on a screen, control sequences taken out."""
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", line).decode(errors="replace").strip()


@contextlib.contextmanager
def ending(child: subprocess.Popen[Any]) -> Iterator[None]:
    """No docker command outlives us: the engine gives up a build or pull whose client goes away."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if child.stdout:
            child.stdout.close()
