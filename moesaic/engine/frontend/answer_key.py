"""Names requests that are the same, so that one that is sent again gets the answer of the first."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from moesaic.core.request import Request

KEY_BYTES = 16


def answer_key(request_id: str, request: Request, sample: int) -> str:
    """Of the `sample`-th sequence of a call. It depends on all that its answer does, so that nobody
    gets the answer to another request by a wrong id."""
    same = request.submission()
    same.rid, same.request_no, same.eos_ids = "", 0, frozenset()
    told = f"{request_id}\0{sample}".encode(errors="surrogatepass")
    digest = blake2b(told, digest_size=KEY_BYTES)
    digest.update(msgspec.msgpack.encode(same))
    return digest.hexdigest()
