"""The kernel images inside the program: fatbins that nvcc made and the build embedded."""

from __future__ import annotations

import pkgutil
import struct

from .errors import EngineError

MAGIC = 0xBA55ED50
NAMES = ("dsv41_ops", "rdma_gather")
GB10 = 121


def targets(image: bytes) -> set[int]:
    """The SASS targets in a fatbin: header of 16 bytes, then entries that name their size and target."""
    if len(image) < 16 or struct.unpack_from("<I", image)[0] != MAGIC:
        return set()
    end = 16 + int(struct.unpack_from("<Q", image, 8)[0])
    at, found = 16, set()
    while at + 64 <= min(end, len(image)):
        header, size = struct.unpack_from("<IQ", image, at + 4)
        found.add(int(struct.unpack_from("<I", image, at + 28)[0]))
        at += header + size
    return found


def check(external: str | None = None) -> None:
    """Refuse a program without kernels for GB10, and an external rdma_gather that is none.

    Raises:
        EngineError: NoKernelImages, NoRdmaKernels.
    """
    for name in NAMES:
        try:
            image = pkgutil.get_data("dsv41", f"images/{name}.fatbin") or b""
        except OSError:
            image = b""
        if GB10 not in targets(image):
            raise EngineError(
                "NoKernelImages", "this build embeds no kernels for sm_121: build it with -Dnvcc or -Dfatbins"
            )
    if external is not None:
        try:
            with open(external, "rb") as handle:  # noqa: PTH123 - a name as the command line gave it
                image = handle.read()
        except OSError as error:
            raise EngineError("NoRdmaKernels", f"{external}: {error.strerror}") from error
        if GB10 not in targets(image):
            raise EngineError("NoRdmaKernels", f"{external} holds no image for sm_121")
