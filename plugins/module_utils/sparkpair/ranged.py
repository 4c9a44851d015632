"""Parts of a repository's files by HTTP Range: what is asked for and not a byte more, counted.

`huggingface_hub` supplies the addresses, the headers and the HTTP session.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from . import hub
from .problem import Problem
from .safetensors import Reader

_TRIES = 4
_PIECE = 1 << 16
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_Result = TypeVar("_Result")


class _Again(Exception):
    """A try that failed in passing. `wait`: seconds that the server asked for, if it did."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


def _pause(seconds: float) -> None:
    time.sleep(seconds)


class Repository:
    """A repository at one commit, to read parts of its files. `received` counts the bytes of all bodies.

    `revision` is what the Hub's addresses take: a full commit, a branch or a tag, no abbreviation.
    """

    def __init__(
        self, repo: str, revision: str, *, endpoint: str | None = None, token: str | None = None
    ) -> None:
        self.repo = repo
        self.endpoint = hub.clean_endpoint(endpoint)
        self.token = hub.check_token(token)
        self.received = 0
        self.revision = revision
        hub.library()

    def whole(self, path: str, most: int) -> bytes:
        """A small file in one request; Problem when it is larger than `most` bytes."""
        return self._persist(path, lambda: self._get(path, None, most)[0])

    def open(self, path: str) -> tuple[Reader, int]:
        """A reader of ranges of `path` and the file's size in bytes. Asks for its first 8 bytes."""
        head, size = self._persist(path, lambda: self._get(path, (0, 8), 8))

        def read(offset: int, count: int) -> bytes:
            if offset + count <= len(head):
                return head[offset : offset + count]
            return self._persist(path, lambda: self._get(path, (offset, count), count)[0])

        return read, size

    def _persist(self, path: str, work: Callable[[], _Result]) -> _Result:
        for attempt in range(1, _TRIES + 1):
            try:
                with hub.answers(self.repo, self.revision, self.endpoint, self.token, path):
                    return work()
            except _Again as reason:
                if attempt == _TRIES:
                    raise Problem(
                        found=f"{path} of {self.repo}: {_TRIES} tries failed; the last: {reason}",
                        needed=f"answers from {self.endpoint}",
                        do="check the network and run the same command again",
                        code="hub-busy",
                    ) from None
                _pause(reason.wait if reason.wait is not None else 0.5 * 2**attempt)
        raise AssertionError("the last try returns or raises")

    def _get(self, path: str, part: tuple[int, int] | None, most: int) -> tuple[bytes, int]:
        """One request. Returns the body and the size of the whole file."""
        import httpx2

        with contextlib.ExitStack() as stack:
            try:
                answer = stack.enter_context(self._stream(path, part))
                self._require_good(answer, path)
                size = self._whole_size(answer, path, part)
                body = self._body(answer, path, most)
            except (httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.TimeoutException) as error:
                raise _Again(str(error) or type(error).__name__) from None
        if part is not None and len(body) != part[1]:
            raise _Again(f"{len(body)} bytes came instead of {part[1]}")
        return body, size

    @contextlib.contextmanager
    def _stream(self, path: str, part: tuple[int, int] | None) -> Iterator[Any]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session

        headers = build_hf_headers(token=self.token or False, library_name="sparkpair")
        # A compressed body would be another count of bytes than the one asked for.
        headers["Accept-Encoding"] = "identity"
        if part is not None:
            headers["Range"] = f"bytes={part[0]}-{part[0] + part[1] - 1}"
        address = hf_hub_url(self.repo, path, revision=self.revision, endpoint=self.endpoint)
        with get_session().stream(
            "GET", address, headers=headers, timeout=hub.TIMEOUT_S, follow_redirects=True
        ) as answer:
            yield answer

    def _require_good(self, answer: Any, path: str) -> None:
        if answer.status_code in hub.PASSING:
            raise _Again(f"the Hub answers {answer.status_code}", hub.retry_after(answer.headers))
        if answer.status_code >= 400:
            raise hub.refusal(
                answer.status_code,
                answer.headers,
                repo=self.repo,
                revision=self.revision,
                path=path,
                endpoint=self.endpoint,
                with_token=self.token is not None,
            )

    def _whole_size(self, answer: Any, path: str, part: tuple[int, int] | None) -> int:
        if part is None:
            return int(answer.headers.get("Content-Length") or 0)
        told = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if answer.status_code != 206 or told is None or int(told[1]) != part[0]:
            raise Problem(
                found=f"{self.endpoint} answers a request for {part[1]} bytes of {path} with status"
                f" {answer.status_code} and no such part",
                needed="a Hub (or mirror) that serves ranges",
                do="set hf_endpoint to one that does; without ranges hundreds of GB would have to be fetched",
                code="hub-no-ranges",
            )
        return int(told[3])

    def _body(self, answer: Any, path: str, most: int) -> bytes:
        body = bytearray()
        for piece in answer.iter_bytes(_PIECE):
            self.received += len(piece)
            body += piece
            if len(body) > most:
                raise Problem(
                    found=f"{path} of {self.repo} sends more than the {most} bytes asked for",
                    needed=f"at most {most} bytes",
                    do="check hf_endpoint (a mirror?), then run the same command again",
                    code="hub-too-much",
                )
        return bytes(body)
