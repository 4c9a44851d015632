"""Whether the overlaid checkpoint stands is told without reading it, and never of other inputs."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from sparkpair import locks, overlay, variants
from sparkpair.locks import Lock, LockedFile

SHARD, TOP, INDEX = "model-00001-of-00001.safetensors", "keys.safetensors", "model.safetensors.index.json"


def tensors(value: int) -> bytes:
    """A safetensors file with one tensor `a` of four bytes."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([value] * 4)


def put(folder: Path, files: dict[str, bytes]) -> Lock:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    entries = [LockedFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()]
    return Lock("acme/x", "1" * 40, tuple(sorted(entries)))


@pytest.fixture
def stock(tmp_path: Path) -> Lock:
    index = json.dumps({"metadata": {}, "weight_map": {"a": SHARD}}).encode()
    return put(tmp_path / "stock", {SHARD: tensors(1), INDEX: index, "config.json": b"{}"})


@pytest.fixture
def keys(tmp_path: Path) -> Lock:
    return put(tmp_path / "overlay", {TOP: tensors(2)})


def test_a_laid_overlay_stands_until_anything_differs(tmp_path: Path, stock: Lock, keys: Lock) -> None:
    out = tmp_path / "out"
    assert not variants.stands(stock, keys, TOP, out)
    overlay.lay(tmp_path / "stock", stock, tmp_path / "overlay" / TOP, keys, out, quiet=True)
    assert variants.stands(stock, keys, TOP, out)
    other_keys = replace(keys, files=(replace(keys.files[0], sha256="0" * 64),))
    other_stock = replace(stock, files=(*stock.files[1:], replace(stock.files[0], size=7)))
    assert not variants.stands(stock, other_keys, TOP, out)
    assert not variants.stands(other_stock, keys, TOP, out)
    assert not variants.stands(stock, keys, "another.safetensors", out)
    (out / "config.json").unlink()
    assert not variants.stands(stock, keys, TOP, out)


def test_a_lock_of_another_form_does_not_stand(tmp_path: Path, stock: Lock, keys: Lock) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / overlay.LOCK_NAME).write_text("{")
    assert not variants.stands(stock, keys, TOP, out)
    (out / overlay.LOCK_NAME).write_text(locks.dump(stock))
    assert not variants.stands(stock, keys, TOP, out)
