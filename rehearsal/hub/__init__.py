"""A stand-in for the Hugging Face Hub, faithful to what `huggingface_hub` 2.x asks of it.

In a test, on 127.0.0.1 and free ports:

    make_repo(root, "org/name", {"config.json": b"{}", "model.safetensors": data})
    with Hub(root) as hub:
        hub.mode("flip", path="*.safetensors", times=1)
        HfApi(endpoint=hub.url).model_info("org/name", files_metadata=True)
        hub.requests(file="*.safetensors")  # what was asked, with the bytes that left

As the Hub does, a file in LFS (`*.safetensors`, anything over 10 MB) is answered with a redirect to a
signed link on another origin: here a second port, `hub.cdn`. It refuses a token, as a storage host does,
and a link past its time. The commit, hash and size of such a file are on the redirect's own headers.
"""

from __future__ import annotations

from .access import NEWCOMER_TOKEN, READER_TOKEN
from .server import Hub
from .store import make_repo, publish

__all__ = ["NEWCOMER_TOKEN", "READER_TOKEN", "Hub", "make_repo", "publish"]
