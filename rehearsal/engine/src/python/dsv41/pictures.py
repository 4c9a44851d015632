"""Pictures in requests: size and main colour. PNG here, other formats by Pillow in a child process."""

from __future__ import annotations

import base64
import binascii
import colorsys
import importlib.metadata
import json
import math
import struct
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import dataclass

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_MAX_PIXELS = 1 << 25
_SAMPLES = 1 << 14
_PATCH = 14 * 3
_MAX_TOKENS = 1024
_CHILD = """
import io, json, sys
from PIL import Image
image = Image.open(io.BytesIO(sys.stdin.buffer.read()))
size = image.size
small = image.convert("RGB").resize((min(64, size[0]), min(64, size[1])), Image.NEAREST)
data = small.tobytes()
print(json.dumps({"size": size, "pixels": [list(data[i:i + 3]) for i in range(0, len(data), 3)]}))
"""


class Undecodable(Exception):
    """A picture that no decoder here can read."""


@dataclass(frozen=True)
class Picture:
    width: int
    height: int
    colour: str

    @property
    def tokens(self) -> int:
        """How many positions the picture takes: a token for each square of 42 pixels, at most 1,024."""
        return max(1, min(_MAX_TOKENS, math.ceil(self.width / _PATCH) * math.ceil(self.height / _PATCH)))

    @property
    def words(self) -> str:
        return f"{self.width}x{self.height}, mostly {self.colour}"


def colour(red: int, green: int, blue: int) -> str:
    """The everyday name of a colour, channels 0 to 255."""
    hue, saturation, value = colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)
    if value < 0.2:
        return "black"
    if saturation < 0.15:
        return "white" if value > 0.85 else "grey"
    degrees = hue * 360
    for limit, name in (
        (15, "red"),
        (45, "orange"),
        (70, "yellow"),
        (165, "green"),
        (195, "cyan"),
        (260, "blue"),
    ):
        if degrees < limit:
            return "brown" if name == "orange" and value < 0.6 else name
    for limit, name in ((295, "purple"), (345, "pink")):
        if degrees < limit:
            return name
    return "red"


def main_colour(pixels: list[tuple[int, int, int]]) -> str:
    """The name that most pixels have; the first by alphabet where two have as many."""
    names = Counter(colour(*p) for p in pixels)
    return min(names, key=lambda n: (-names[n], n))


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    at, found = len(_SIGNATURE), []
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if len(body) != size or zlib.crc32(kind + body) != int.from_bytes(
            data[at + 8 + size : at + 12 + size], "big"
        ):
            raise Undecodable("a damaged PNG")
        found.append((kind, body))
        if kind == b"IEND":
            return found
        at += 12 + size
    raise Undecodable("a PNG that ends early")


def _unfilter(raw: bytes, rows: int, width: int, step: int) -> list[bytearray]:
    """The rows of a PNG's pixel data, `width` bytes each, `step` bytes from pixel to pixel."""
    out: list[bytearray] = []
    above = bytearray(width)
    for r in range(rows):
        kind = raw[r * (width + 1)]
        row = bytearray(raw[r * (width + 1) + 1 : (r + 1) * (width + 1)])
        if kind > 4:
            raise Undecodable("a PNG filter that does not exist")
        if kind:
            for i in range(width):
                left = row[i - step] if i >= step else 0
                corner = above[i - step] if i >= step else 0
                if kind == 1:
                    guess = left
                elif kind == 2:
                    guess = above[i]
                elif kind == 3:
                    guess = (left + above[i]) // 2
                else:
                    estimate = left + above[i] - corner
                    guess = min((left, above[i], corner), key=lambda v: abs(estimate - v))
                row[i] = (row[i] + guess) & 0xFF
        out.append(row)
        above = row
    return out


def _png(data: bytes) -> Picture:
    chunks = _chunks(data)
    if chunks[0][0] != b"IHDR" or len(chunks[0][1]) != 13:
        raise Undecodable("a PNG without a header")
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if kind not in _CHANNELS or depth not in {1, 2, 4, 8, 16} or not 0 < width * height <= _MAX_PIXELS:
        raise Undecodable("a PNG of an unknown kind or size")
    if interlaced:
        return _pillow(data)
    channels = _CHANNELS[kind]
    line = (width * channels * depth + 7) // 8
    expander = zlib.decompressobj()
    try:
        raw = expander.decompress(b"".join(b for k, b in chunks if k == b"IDAT"), (line + 1) * height)
    except zlib.error as error:
        raise Undecodable(f"a PNG's data: {error}") from None
    if len(raw) != (line + 1) * height:
        raise Undecodable("a PNG with too few pixels")
    rows = _unfilter(raw, height, line, max(channels * depth // 8, 1))
    palette = next((b for k, b in chunks if k == b"PLTE"), b"")
    every = max(width * height // _SAMPLES, 1)
    pixels = [
        _pixel(rows[i // width], i % width, depth, kind, palette) for i in range(0, width * height, every)
    ]
    return Picture(width, height, main_colour(pixels))


def _pixel(row: bytearray, x: int, depth: int, kind: int, palette: bytes) -> tuple[int, int, int]:
    channels, wide = _CHANNELS[kind], depth == 16
    if depth < 8:
        bits = row[x * depth // 8] >> (8 - depth - x * depth % 8) & ((1 << depth) - 1)
        value = bits if kind == 3 else bits * 255 // ((1 << depth) - 1)
    else:
        value = row[x * channels * (2 if wide else 1)]
    if kind == 3:
        entry = palette[value * 3 : value * 3 + 3]
        if len(entry) != 3:
            raise Undecodable("a PNG that names a colour beyond its palette")
        return entry[0], entry[1], entry[2]
    if kind in {0, 4}:
        return value, value, value
    step = 2 if wide else 1
    first = x * channels * step
    return row[first], row[first + step], row[first + 2 * step]


def pillow_version() -> str | None:
    try:
        return importlib.metadata.version("pillow")
    except importlib.metadata.PackageNotFoundError:
        return None


def _pillow(data: bytes) -> Picture:
    if pillow_version() is None:
        raise Undecodable("not a PNG, and there is no Pillow here")
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD], input=data, capture_output=True, timeout=60, check=False
    )
    if done.returncode:
        raise Undecodable("neither a PNG nor a picture that Pillow reads")
    told = json.loads(done.stdout)
    return Picture(
        int(told["size"][0]), int(told["size"][1]), main_colour([tuple(p) for p in told["pixels"]])
    )


def decode(data: bytes) -> Picture:
    """Size and main colour of a picture.

    Raises:
        Undecodable: for anything that is none.
    """
    return _png(data) if data.startswith(_SIGNATURE) else _pillow(data)


def from_url(url: str) -> Picture:
    """The picture in a `data:` URL.

    Raises:
        Undecodable: also for any other kind of URL.
    """
    head, sep, body = url.partition(",")
    if not url.startswith("data:image/") or not sep or not head.endswith(";base64"):
        raise Undecodable("pictures come as data:image/...;base64 URLs")
    try:
        return decode(base64.b64decode(body, validate=True))
    except binascii.Error as error:
        raise Undecodable(f"base64: {error}") from None
