"""A small file of changed tensors laid over a checkpoint, without a second copy of its 196 GiB.

The result is a folder of its own: hard links to the checkpoint's files, the overlay under a name that sorts
after every shard (the engine reads shards in sorted order, the later one wins), and an index that points
the overlaid names at it. It has its own lock, and receipts taken over from the files that it links to, so
nothing big is read. The checkpoint itself is not touched: back and forth is a choice of folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import atomic, locks, safetensors, verify
from .console import counted
from .locks import OWN_PREFIX, Lock, LockedFile, listed
from .problem import Problem
from .receipts import NAME as RECEIPTS
from .receipts import Receipts

NAME = "zz_keys_overlay.safetensors"
LOCK_NAME = f"{OWN_PREFIX}-overlay-lock.json"
# Says that a folder was made here, so that what it holds may be replaced. Written before the first link.
MARK = f"{OWN_PREFIX}-overlay"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Result:
    """What was laid: the folder's lock and where it is, the overlaid tensors, whether anything changed."""

    lock: Lock
    lock_path: Path
    tensors: int
    changed: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": True,
            "changed": self.changed,
            "tensors": self.tensors,
            "files": len(self.lock.files),
            "lock": str(self.lock_path),
        }


def lay(
    stock: Path,
    lock: Lock,
    overlay: Path,
    overlay_lock: Lock,
    out: Path,
    *,
    lock_path: Path | None = None,
    quiet: bool = False,
) -> Result:
    """Make `out` the checkpoint `stock` with `overlay` on top.

    Args:
        stock: the verified checkpoint; files without a receipt are read and get one.
        overlay: the verified safetensors file, on the same filesystem as `stock`.
        overlay_lock: names `overlay` by its file name.
        out: a folder of its own on the same filesystem.
        lock_path: where the result's lock goes (default: in `out`).

    Raises Problem before anything is changed when a part isn't what its lock says, or a tensor of the
    overlay is unknown to the checkpoint or has another type or shape there.
    """
    lock_path = lock_path or out / LOCK_NAME
    entry = _overlay_entry(overlay, overlay_lock)
    _require_apart(stock, out)
    _require_apart(overlay.parent, out)
    _require_verified(lock, stock, quiet=quiet)
    _require_verified(replace(overlay_lock, files=(entry,)), overlay.parent, quiet=quiet)
    header = safetensors.read_file_header(overlay)
    standing = _standing(out, lock_path, lock, overlay_lock)
    if standing and _is_linked(stock, lock, overlay, out):
        return Result(standing, lock_path, len(header.tensors), changed=False)
    _require_ours(out)
    index = _index(stock, lock)
    _require_fit(header, index, stock, lock)
    text = overlaid_index(index, header)
    result_lock = overlaid_lock(lock, overlay_lock, entry, text)
    with _owned_like(stock):
        out.mkdir(parents=True, exist_ok=True)
        atomic.write_text(out / MARK, "This folder was made by sparkpair overlay.\n")
        _sweep(out, result_lock, lock_path)
        for file in lock.files:
            if file.path != _INDEX:
                _link(stock / file.path, out / file.path)
        _link(overlay, out / NAME)
        atomic.write_bytes(out / _INDEX, text)
        _take_receipts_over(result_lock, out)
        atomic.write_text(lock_path, locks.dump(result_lock))
    report = verify.verify(result_lock, out, quiet=quiet)
    for problem in report.problems:
        raise problem
    return Result(result_lock, lock_path, len(header.tensors), changed=True)


def overlaid_index(index: dict[str, Any], header: safetensors.Header) -> bytes:
    """The checkpoint's index with the overlay's tensors pointed at it; the rest as it was, in its order."""
    weight_map = {
        name: NAME if name in header.tensors else shard for name, shard in index["weight_map"].items()
    }
    return (json.dumps({**index, "weight_map": weight_map}, indent=2, ensure_ascii=False) + "\n").encode()


def overlaid_lock(lock: Lock, overlay_lock: Lock, entry: LockedFile, index: bytes) -> Lock:
    """The lock of the result. Its `revision` is no commit but a digest of the two that it comes from."""
    files = {file.path: file for file in lock.files}
    files[_INDEX] = LockedFile(_INDEX, len(index), sha256=hashlib.sha256(index).hexdigest())
    files[NAME] = replace(entry, path=NAME)
    return Lock(lock.repo, _revision(lock, overlay_lock), tuple(sorted(files.values())), gated=True)


def _revision(lock: Lock, overlay_lock: Lock) -> str:
    parts = f"{locks.dump(lock)}{locks.dump(overlay_lock)}{NAME}"
    return hashlib.sha256(parts.encode()).hexdigest()[:40]


def _overlay_entry(overlay: Path, overlay_lock: Lock) -> LockedFile:
    entry = overlay_lock.by_path.get(overlay.name)
    if entry is None:
        raise Problem(
            found=f"the lock of {overlay_lock.repo} does not name {overlay.name}",
            needed=f"one of its files: {listed([file.path for file in overlay_lock.files])}",
            do="name the overlay's file as it was fetched (--overlay DIR/NAME)",
            code="overlay-unlocked",
        )
    return entry


def _require_apart(source: Path, out: Path) -> None:
    inside = out.resolve()
    if inside.is_relative_to(source.resolve()) or source.resolve().is_relative_to(inside):
        raise Problem(
            found=f"the result {out} and what it is made of, {source}, are in each other",
            needed="a folder of its own beside it: the engine reads every shard of a folder",
            do=f"name another one: --out {source}-keys",
            code="overlay-out",
        )


def _require_ours(out: Path) -> None:
    """Only what an earlier run made may be replaced: another checkpoint has shards of the same names."""
    if not out.exists() or (out / MARK).is_file():
        return
    if not out.is_dir() or any(path.name != f".{MARK}.partial" for path in out.iterdir()):
        raise Problem(
            found=f"{out} is there and was not made by sparkpair overlay",
            needed="a folder that is not there yet, an empty one, or an earlier result",
            do=f"name another one (--out), or move it away: mv {out} ANOTHER_PLACE",
            code="overlay-out",
        )


def _require_verified(lock: Lock, folder: Path, *, quiet: bool) -> None:
    for problem in verify.verify(lock, folder, only_listed=True, quiet=quiet).problems:
        raise problem


def _standing(out: Path, lock_path: Path, lock: Lock, overlay_lock: Lock) -> Lock | None:
    """The result's lock if a result of the same two inputs stands, whole by its receipts."""
    if not lock_path.is_file():
        return None
    with contextlib.suppress(Problem):
        found = locks.load(lock_path)
        if found.revision == _revision(lock, overlay_lock) and verify.verify(found, out, quiet=True).ok:
            return found
    return None


def _is_linked(stock: Path, lock: Lock, overlay: Path, out: Path) -> bool:
    pairs = [(stock / file.path, out / file.path) for file in lock.files if file.path != _INDEX]
    return all(here.samefile(there) for here, there in [*pairs, (overlay, out / NAME)])


def _index(stock: Path, lock: Lock) -> dict[str, Any]:
    if _INDEX not in lock.by_path:
        raise Problem(
            found=f"the lock of {lock.repo} has no {_INDEX}",
            needed="a checkpoint with an index",
            do="lock the whole checkpoint: sparkpair lock OWNER/NAME@REVISION --out FILE",
            code="overlay-index",
        )
    try:
        index = json.loads((stock / _INDEX).read_bytes())
    except (ValueError, RecursionError):
        index = None
    locks.check_index(lock, _INDEX, index)
    return dict(index)


def _require_fit(header: safetensors.Header, index: dict[str, Any], stock: Path, lock: Lock) -> None:
    """Each tensor of the overlay must be in the checkpoint, with the same type and shape."""
    weight_map = index["weight_map"]
    unknown = sorted(name for name in header.tensors if name not in weight_map)
    if unknown:
        raise _misfit(
            header, f"{counted(len(unknown), 'tensor')} that the checkpoint lacks: {listed(unknown)}", lock
        )
    if not header.tensors:
        raise _misfit(header, "no tensor at all", lock)
    late = [shard for shard in set(weight_map.values()) if shard >= NAME]
    if late:
        raise _misfit(header, f"a name that sorts before {late[0]}", lock)
    shards = {
        shard: safetensors.read_file_header(stock / shard)
        for shard in sorted({weight_map[name] for name in header.tensors})
    }
    for name, tensor in header.tensors.items():
        there = shards[weight_map[name]].tensors.get(name)
        ours = f"{tensor.dtype} {list(tensor.shape)}"
        theirs = f"{there.dtype} {list(there.shape)}" if there else "not in the shard that its index names"
        if ours != theirs:
            raise _misfit(header, f"{name} as {ours}; the checkpoint: {theirs}", lock)


def _misfit(header: safetensors.Header, what: str, lock: Lock) -> Problem:
    return Problem(
        found=f"{header.source} has {what}",
        needed=f"tensors of {lock.repo} @ {lock.revision[:12]}, each of the same type and shape",
        do="use the overlay that was made for this checkpoint (the profile's overlay: entry)",
        code="overlay-misfit",
    )


def _sweep(out: Path, lock: Lock, lock_path: Path) -> None:
    """Remove what an earlier result held and the new one doesn't; refuse what isn't ours to remove."""
    book = Receipts.open(out)
    kept = {file.path for file in lock.files} | {RECEIPTS, MARK, lock_path.name}
    for name, found in list(verify.walk(out)):
        if name in kept or (out / name).is_dir():
            continue
        left_over = Path(name).name.startswith(".") and name.endswith(".partial")
        if found.st_nlink < 2 and not left_over and book.noted(name) is None:
            raise Problem(
                found=f"{out / name} is no part of the checkpoint with its overlay",
                needed="a folder that holds nothing else",
                do=f"move it away: mv {out / name} ANOTHER_FOLDER/",
                code="stray-file",
            )
        (out / name).unlink()


def _link(source: Path, place: Path) -> None:
    """Make `place` another name of `source`, in one step."""
    with contextlib.suppress(FileNotFoundError):
        if place.samefile(source) and not place.is_symlink():
            return
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_name(f".{place.name}.partial")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        raise Problem(
            found=f"{source} can't be linked to {place.parent}: {error.strerror}",
            needed="both on one filesystem with hard links, owned by the user who links",
            do="fetch the overlay and lay it on the checkpoint's own filesystem, as the service user",
            code="overlay-link",
        ) from None
    fresh.replace(place)


def _take_receipts_over(lock: Lock, out: Path) -> None:
    """Receipts for the result: all its bytes were vouched for under other names, or were just written."""
    book = Receipts.open(out)
    for file in lock.files:
        book.record(file, (out / file.path).stat())
    book.save()


@contextlib.contextmanager
def _owned_like(stock: Path) -> Iterator[None]:
    """Write as the checkpoint's owner when root asks, so that nothing of root's is left (field report 33)."""
    owner = stock.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
