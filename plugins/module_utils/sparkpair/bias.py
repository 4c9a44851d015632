"""The image routing bias of the kernel kit: the `*.ffn.gate.bias_vl` tensors, copied byte for byte.

The 1017 checkpoint holds them; the quantization of the earlier one dropped them, so that they are fetched
from the original repository: its index, the headers of the shards concerned and the tensors' own bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, made, modelconfig, safetensors
from .problem import Problem
from .safetensors import Header, Tensor

SUFFIX = ".ffn.gate.bias_vl"
INDEX = "model.safetensors.index.json"
# The text under `__metadata__.source` of the recorded file.
SOURCE = "deepseek-ai/DeepSeek-V4.1-Flash (MIT): the ffn.gate.bias_vl tensors, byte for byte"
LARGEST_INDEX = 128 * 2**20

_LAYER = re.compile(r"layers\.(0|[1-9]\d*)" + re.escape(SUFFIX))
# Draft blocks may route over fewer experts than the layers do.
_DRAFT_EXPERTS = 128
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Expected:
    """How many tensors there must be, one a layer and one a draft block, and their length (experts)."""

    layers: int = 40
    drafts: int = 3
    experts: int = 384

    @property
    def count(self) -> int:
        return self.layers + self.drafts


@dataclass(frozen=True)
class Bias:
    """One tensor with its bytes."""

    tensor: Tensor
    data: bytes


def expected_of(config: Mapping[str, Any], source: str = "config.json") -> Expected:
    """What a configuration asks for. Raises Problem naming the key that is missing or wrong."""
    text = modelconfig.text_section(config, source)
    return Expected(
        layers=text.whole("num_hidden_layers", 1, 1000),
        drafts=text.whole("num_nextn_predict_layers", 0, 1000),
        experts=text.whole("n_routed_experts", 1, 65_536),
    )


def check(tensors: Iterable[Tensor], expected: Expected, source: str) -> None:
    """Raise Problem naming the first tensor that is missing, too many, or of a wrong type or shape."""
    found = {tensor.name: tensor for tensor in tensors}
    for layer in range(expected.layers):
        name = f"layers.{layer}{SUFFIX}"
        if name not in found:
            raise _wrong(source, f"has no {name} ({len(found)} of this kind in all)", f"{expected.count}")
    drafts = sorted(found.keys() - {f"layers.{layer}{SUFFIX}" for layer in range(expected.layers)})
    stray = next((name for name in drafts if _LAYER.fullmatch(name)), None)
    if stray or len(drafts) != expected.drafts:
        listed = f"{stray}" if stray else f"{len(drafts)} beside the layers' ({', '.join(drafts[:4]) or '-'})"
        raise _wrong(source, f"has {listed}", f"{expected.layers} layers and {expected.drafts} draft blocks")
    for tensor in found.values():
        allowed = {expected.experts} | (set() if _LAYER.fullmatch(tensor.name) else {_DRAFT_EXPERTS})
        if tensor.dtype != "F32":
            raise _wrong(source, f"has {tensor.name} as {tensor.dtype}", "F32")
        if len(tensor.shape) != 1 or tensor.shape[0] not in allowed:
            raise _wrong(source, f"has {tensor.name} of shape {list(tensor.shape)}", f"[{expected.experts}]")


def pack(biases: Iterable[Bias], source_text: str) -> bytes:
    """The file as the kit records it: tensors by name as text, metadata last, header padded to 8 bytes."""
    ordered = sorted(biases, key=lambda bias: bias.tensor.name)
    entries: dict[str, Any] = {}
    at = 0
    for bias in ordered:
        end = at + len(bias.data)
        entries[bias.tensor.name] = {
            "dtype": bias.tensor.dtype,
            "shape": list(bias.tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    entries["__metadata__"] = {"source": source_text}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(bias.data for bias in ordered)


def names_by_shard(index: Any, source: str) -> dict[str, list[str]]:
    """Shard file -> names of its bias tensors, by an index (`model.safetensors.index.json`, decoded)."""
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict):
        raise _wrong(source, "has no weight_map", "an index of a checkpoint")
    shards: dict[str, list[str]] = {}
    for name, shard in weights.items():
        if not name.endswith(SUFFIX):
            continue
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise _wrong(source, f"places {name} in {shard!r:.80}", "the name of a file beside it")
        shards.setdefault(shard, []).append(name)
    if not shards:
        raise Problem(
            found=f"{source} names no *{SUFFIX} tensor: this quantization left them out",
            needed="a checkpoint that holds them, or the original repository",
            do="fetch them from the original: sparkpair bias --repo OWNER/NAME@REVISION --out FILE",
            code="bias-absent",
        )
    return {shard: sorted(names) for shard, names in sorted(shards.items())}


def decode_index(raw: bytes, source: str) -> Any:
    """The index as JSON; Problem when it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise _wrong(source, "is not JSON", "an index of a checkpoint") from None


def pick(header: Header, names: Iterable[str]) -> list[Tensor]:
    """The named tensors of a shard. Raises Problem naming one that its index promised and it lacks."""
    for name in names:
        if name not in header.tensors:
            raise _wrong(header.source, f"has no tensor {name}", "what the index says it holds")
    return [header.tensors[name] for name in names]


def from_checkpoint(model: Path) -> list[Bias]:
    """The bias tensors of a checkpoint folder: by its index, or by the headers of all its files.

    Reads headers and the tensors themselves, no other weights.
    """
    index = model / INDEX
    if index.is_file():
        if index.stat().st_size > LARGEST_INDEX:
            raise _wrong(str(index), f"has {index.stat().st_size} bytes", f"at most {LARGEST_INDEX}")
        wanted = names_by_shard(decode_index(index.read_bytes(), str(index)), str(index))
        return [bias for shard, names in wanted.items() for bias in _of_file(model / shard, names)]
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise _wrong(str(model), "holds no *.safetensors file", "a checkpoint")
    biases: list[Bias] = []
    for path in files:
        biases += _of_file(path, None)
    names = [bias.tensor.name for bias in biases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise _wrong(str(model), f"holds {twice} in two files", "each tensor once")
    return biases


def _of_file(path: Path, names: list[str] | None) -> list[Bias]:
    header = safetensors.read_file_header(path)
    if names is None:
        names = sorted(name for name in header.tensors if name.endswith(SUFFIX))
    biases = []
    with path.open("rb") as handle:
        for tensor in pick(header, names):
            _require_small(tensor, str(path))
            handle.seek(tensor.offset)
            biases.append(Bias(tensor, handle.read(tensor.size)))
    return biases


def _require_small(tensor: Tensor, source: str) -> None:
    """A bias is a vector of experts: one that claims gigabytes is not read to be refused later."""
    if tensor.size > 65_536 * 8:
        raise _wrong(source, f"has {tensor.name} of shape {list(tensor.shape)}", "one number an expert")


def from_repo(
    repo: str, revision: str, *, endpoint: str | None = None, token: str | None = None
) -> tuple[list[Bias], int]:
    """The bias tensors of a repository by bounded Range requests, and the bytes that came for it.

    A branch or an abbreviated commit is resolved first. Raises Problem as `hub.check_access` does, and
    hub-no-ranges where the server would send whole shards.
    """
    from . import hub
    from .ranged import Repository

    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        revision = hub.resolve(repo, revision, token=token, endpoint=endpoint).revision
    remote = Repository(repo, revision, endpoint=endpoint, token=token)
    index = decode_index(remote.whole(INDEX, LARGEST_INDEX), f"{repo}/{INDEX}")
    biases: list[Bias] = []
    for shard, names in names_by_shard(index, f"{repo}/{INDEX}").items():
        source = f"{repo}/{shard}"
        read, size = remote.open(shard)
        for tensor in pick(safetensors.read_header(read, size, source), names):
            _require_small(tensor, source)
            biases.append(Bias(tensor, safetensors.read_tensor(read, tensor)))
    return biases, remote.received


def identity_of(model: Path) -> str:
    """A fingerprint of a checkpoint folder by stats alone: index and shards."""
    files = [path for path in (model / INDEX, *sorted(model.glob("*.safetensors"))) if path.is_file()]
    return made.fingerprint({path.name: made.identity(path) for path in files})


def standing(out: Path, made_from: str, expected_sha256: str | None) -> str | None:
    """The sha256 of the file at `out` when it was made from the same, else None. Stats only."""
    sha256 = (made.vouched(out.parent, out.name, made_from) or {}).get(out.name)
    return None if expected_sha256 is not None and sha256 != expected_sha256 else sha256


def install(
    biases: list[Bias],
    expected: Expected,
    out: Path,
    *,
    source: str,
    source_text: str,
    made_from: str,
    expected_sha256: str | None = None,
) -> str:
    """Check the tensors, write the file to `out` and return its sha256. Nothing wrong is installed."""
    check((bias.tensor for bias in biases), expected, source)
    for bias in biases:
        if len(bias.data) != math.prod(bias.tensor.shape) * 4:
            raise _wrong(source, f"ended inside {bias.tensor.name}", "a whole file")
    data = pack(biases, source_text)
    sha256 = hashlib.sha256(data).hexdigest()
    if expected_sha256 is not None and sha256 != expected_sha256:
        raise _wrong(
            source, f"gives a bias file of sha256 {sha256}", f"sha256 {expected_sha256}, as recorded"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(out, data)
    made.record(out.parent, out.name, made_from, {out.name: sha256})
    return sha256


def _wrong(source: str, found: str, needed: str) -> Problem:
    return Problem(
        found=f"{source} {found}",
        needed=needed,
        do="verify the checkpoint against its lock (sparkpair verify) and name the right one",
        code="bias-wrong",
    )
