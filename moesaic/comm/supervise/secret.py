"""The secret of a service of several nodes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Final

from moesaic.comm.network.handshake import SECRET_BYTES

SECRET: Final = "MOESAIC_SECRET"


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """That of the environment, the same on all nodes; empty if there is none."""
    secret = environment.get(SECRET, "").encode()
    if secret and len(secret) < SECRET_BYTES:
        raise ValueError(
            f"{SECRET} has {len(secret)} bytes: give {SECRET_BYTES} or more, the same on all nodes"
        )
    return secret


def new_secret() -> bytes:
    return secrets.token_bytes(32)
