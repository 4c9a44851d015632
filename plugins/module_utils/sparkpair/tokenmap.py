"""Engram's token map: which tokens count as one, made from a checkpoint's tokenizer.json.

A JSON array: index = token id, value = compressed id. Tokens whose text is the same after normalising
(case, accents, width, runs of blanks) share one id, given in the order in which they first appear.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import atomic, made, modelconfig
from .problem import Problem

_BLANK = "\ue000"  # of the private use area: stands for "nothing but one blank" while ends are stripped
_UNDECODABLE = "\ufffd"
_LARGEST_TOKENIZER = 256 * 2**20
_DO = "take tokenizer.json and config.json from the same checkpoint (sparkpair verify names a changed file)"


def expectations(config: Mapping[str, Any], source: str = "config.json") -> tuple[int, int]:
    """(number of token ids, number of distinct compressed ids) that a configuration asks for."""
    text = modelconfig.text_section(config, source)
    ids = text.whole("vocab_size", 1, 2**31 - 1)
    return ids, text.whole("engram_compressed_vocab_size", 1, ids)


def compressed_ids(tokenizer: Any) -> list[int]:
    """The compressed id of each token id of a `tokenizers.Tokenizer`, special tokens included."""
    from tokenizers import Regex, normalizers

    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    ).normalize_str
    seen: dict[str, int] = {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    numbers = []
    for token, text in enumerate(texts):
        key = tokenizer.id_to_token(token) if _UNDECODABLE in text else normalise(text) or text
        numbers.append(seen.setdefault(key, len(seen)))
    return numbers


def load_tokenizer(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json. Raises Problem when it can't be one."""
    import tokenizers

    size = path.stat().st_size
    if size > _LARGEST_TOKENIZER:
        raise Problem(
            found=f"{path} has {size} bytes",
            needed=f"a tokenizer of at most {_LARGEST_TOKENIZER} bytes",
            do=_DO,
            code="tokenizer-unreadable",
        )
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # the package raises bare Exception, with the parser's words
        raise Problem(
            found=f"{path} is no tokenizer: {error}",
            needed="a tokenizer.json as the tokenizers package writes it",
            do=_DO,
            code="tokenizer-unreadable",
        ) from None


def build(tokenizer_path: Path, ids: int, distinct: int) -> bytes:
    """The map as the engine reads it, checked against the counts that the configuration asks for."""
    tokenizer = load_tokenizer(tokenizer_path)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != ids:
        raise _wrong(tokenizer_path, f"has {found} token ids", f"{ids} (vocab_size of config.json)")
    holes = [token for token in range(ids) if tokenizer.id_to_token(token) is None]
    if holes:
        raise _wrong(tokenizer_path, f"has no token {holes[0]}", f"every id below {ids}")
    numbers = compressed_ids(tokenizer)
    compressed = max(numbers) + 1
    if compressed != distinct:
        raise _wrong(
            tokenizer_path,
            f"gives {compressed} distinct compressed ids",
            f"{distinct} (engram_compressed_vocab_size of config.json)",
        )
    return json.dumps(numbers).encode()


def standing(tokenizer: Path, counts: tuple[int, int], out: Path, expected: str | None) -> str | None:
    """The sha256 of the map `out` when it was made from this very tokenizer file, else None. Stats only."""
    hashes = made.vouched(out.parent, out.name, _made_from(tokenizer, counts))
    sha256 = (hashes or {}).get(out.name)
    return None if expected is not None and sha256 != expected else sha256


def _made_from(tokenizer: Path, counts: tuple[int, int]) -> str:
    return made.fingerprint({"tokenizer": made.identity(tokenizer), "counts": counts})


def make(tokenizer: Path, counts: tuple[int, int], out: Path, expected: str | None = None) -> str:
    """Write the map to `out` and return its sha256. One that is not as `expected` is not installed."""
    made_from = _made_from(tokenizer, counts)
    data = build(tokenizer, *counts)
    sha256 = hashlib.sha256(data).hexdigest()
    if expected is not None and sha256 != expected:
        raise _wrong(tokenizer, f"gives a token map of sha256 {sha256}", f"sha256 {expected}, as recorded")
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(out, data)
    made.record(out.parent, out.name, made_from, {out.name: sha256})
    return sha256


def _wrong(tokenizer: Path, found: str, needed: str) -> Problem:
    return Problem(found=f"{tokenizer} {found}", needed=needed, do=_DO, code="tokenizer-wrong")
