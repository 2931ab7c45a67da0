"""The secret that all nodes of a service share. No torch here."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Mapping
from typing import Final

from moesaic.core.process import NODE_SECRET

SECRET_BYTES: Final = 16
# The secret of a service that was started without one. It is public, and keeps no one out.
NO_SECRET: Final = b"moesaic: no secret was given"
FILE_FLAG: Final = "--node-secret-file"
HOW_TO_MAKE: Final = "make one with `openssl rand -hex 32 > FILE; chmod 600 FILE`"


def check_secret(secret: bytes, name: str = "the secret") -> bytes:
    if len(secret) < SECRET_BYTES:
        raise ValueError(
            f"{name} has {len(secret)} bytes: give {SECRET_BYTES} or more, the same on all nodes"
        )
    return secret


def own_secret(environment: Mapping[str, str] = os.environ, file: str | None = None) -> bytes:
    """The secret of the environment or of a file; empty if none is given."""
    given = environment.get(NODE_SECRET, "").strip().encode()  # as that of a file
    if given:
        check_secret(given, NODE_SECRET)
    if file is None:
        return given
    secret = _read(file)
    if given not in (b"", secret):
        raise ValueError(
            f"{FILE_FLAG} {file} has another secret than {NODE_SECRET}: give one of the two"
        )
    return secret


def check_is_secret(secret: bytes, *addresses: str) -> None:
    """Raises ValueError if others than processes of this machine reach the addresses, and there is
    no secret."""
    reached = [one for one in addresses if not ipaddress.ip_address(one).is_loopback]
    if reached and secret in (b"", NO_SECRET):
        raise ValueError(
            f"the nodes have no secret, and every process that reaches {reached[0]} could join: "
            f"{HOW_TO_MAKE} and give all nodes {FILE_FLAG} FILE, or its content as {NODE_SECRET}"
        )


def _read(path: str) -> bytes:
    name = f"{FILE_FLAG} {path}"
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            is_ours = found.st_uid in (0, os.geteuid())
            if mode & 0o077 or not is_ours:
                own = "" if is_ours else f"chown {os.geteuid()} {path}; "
                raise ValueError(
                    f"{name} (mode {mode:o}, of user {found.st_uid}) is open to other users: "
                    f"run `{own}chmod 600 {path}`"
                )
            secret = file.read().strip()
    except OSError as error:
        raise ValueError(
            f"{name} cannot be read ({error.strerror}): {HOW_TO_MAKE}, and copy it to all nodes"
        ) from None
    # A variable hands it to the supervisor.
    if not (secret.isascii() and secret.decode("ascii", "replace").isprintable()):
        raise ValueError(f"{name} is not a line of text: {HOW_TO_MAKE}")
    return check_secret(secret, name)
