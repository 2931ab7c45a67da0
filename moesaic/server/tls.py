"""HTTPS: the certificate is checked before anything is loaded, and read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final

from moesaic.config import ServerArgs

logger = logging.getLogger(__name__)

CHECK_SECONDS: Final = 10.0


def tls_options(args: ServerArgs) -> dict[str, Any]:
    """uvicorn's options; empty without a certificate."""
    if args.ssl_certfile is None:
        return {}
    return {
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_keyfile_password": args.ssl_keyfile_password,
        "ssl_ca_certs": args.ssl_ca_certs,
    }


def check_certificate(args: ServerArgs) -> None:
    """ValueError if the certificate cannot be used."""
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _load(context, args)
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except OSError as error:  # also what ssl raises
        files = [args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs]
        named = ", ".join(file for file in files if file is not None)
        raise ValueError(f"--ssl-certfile cannot be used ({named}): {error}") from None


def _load(context: ssl.SSLContext, args: ServerArgs) -> None:
    assert args.ssl_certfile is not None
    # Without a password OpenSSL would ask at the terminal.
    password = args.ssl_keyfile_password or ""
    context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, lambda: password)


async def refresh_certificate(
    context: ssl.SSLContext, args: ServerArgs, seconds: float = CHECK_SECONDS
) -> None:
    """Loads the certificate again whenever its files change; new connections use it."""
    assert args.ssl_certfile is not None
    files = [Path(file) for file in (args.ssl_certfile, args.ssl_keyfile) if file is not None]
    known = _stamps(files)
    while True:
        await asyncio.sleep(seconds)
        found = _stamps(files)
        if found is None or found == known:
            continue
        try:
            _load(context, args)
        except OSError as error:  # such as a key without its certificate: the next check may pass
            logger.warning("the certificate has changed and cannot be used yet: %s", error)
        else:
            known = found
            logger.info("the certificate was read again")


def _stamps(files: list[Path]) -> list[int] | None:
    """When the files changed; None while one cannot be read, as in the middle of a rotation."""
    try:
        return [file.stat().st_mtime_ns for file in files]
    except OSError as error:
        logger.warning("the certificate cannot be read now: %s", error)
        return None
