"""TLS 1.3 on control connections between nodes, keyed by the secret of the service. No torch here.

All nodes derive one key pair from the secret, and from that one certificate, byte for byte the
same. Both ends of a connection present it and trust no other, so that no certificates have to be
made or distributed. `cryptography` is imported at first use: a service on one node does not need
it.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, Self

LABEL: Final = b"moesaic: the key of control connections, 1"
NAME: Final = "moesaic"
# Clocks of nodes may be wrong, and a secret has no date.
VALID_FROM: Final = datetime(1970, 1, 1, tzinfo=UTC)
VALID_UNTIL: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
# A handshake takes about 2 KB from each end; a stranger may send no more than this.
HANDSHAKE_BYTES: Final = 1 << 14
RECEIVED_AT_ONCE: Final = 1 << 16
SENT_AT_ONCE: Final = 1 << 20


class Tampered(ConnectionError):
    """What came is not what the peer sent."""


class WrongSecret(PermissionError):
    """The listener has another secret."""

    def __init__(self) -> None:
        super().__init__("it does not know this node's secret: give all nodes the same")


class TlsConnection:
    """A connection on which one thread may send while another receives.

    An SSLSocket does not allow that: OpenSSL must not read and write at once, and Python has no
    lock for it (3.13.6 has one, which a reader holds while it waits). Here OpenSSL works in memory
    only, under a lock, and waits for the network are outside of it.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, calls: bool) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=not calls)

    def hand_shake(self, deadline: float) -> None:
        """Raises PermissionError if the peer has no or another secret, or does not speak TLS. A
        listener does not say why: to a stranger it says nothing."""
        left, is_answered = HANDSHAKE_BYTES, False
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                is_answered = self._flush() or is_answered
            except ssl.SSLError as error:
                raise self._refusal(error, is_answered) from error
            else:
                self._flush()
                return
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            data = received(self._connection, min(left, RECEIVED_AT_ONCE)) if left else b""
            left -= len(data)
            if not data:
                raise self._refusal(ConnectionError("the connection was closed"), is_answered)
            self._received.write(data)

    def _refusal(self, error: OSError, is_answered: bool) -> OSError:
        """`is_answered`: the peer has seen what this end says first."""
        if not self._tls.server_side:
            if isinstance(error, ssl.SSLCertVerificationError):
                self._flush()  # tells the listener why
                return WrongSecret()
            if isinstance(error, ssl.SSLError):
                return PermissionError(f"it does not speak TLS as this node does: {error.reason}")
            return error
        if is_answered:
            return PermissionError(
                "it does not accept this node's certificate, or has not the same: it has no or "
                "another secret"
            )
        return PermissionError("it does not speak this protocol: TLS 1.3 is expected")

    def _flush(self) -> bool:
        data = self._to_send.read()
        if data:
            self._connection.sendall(data)
        return bool(data)

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            with self._lock:
                left = left[self._tls.write(left[:SENT_AT_ONCE]) :]
                encrypted = self._to_send.read()
            self._connection.sendall(encrypted)

    def recv(self, most: int) -> bytes:
        """What is there, up to `most` bytes; empty at the end. Tampered if that was changed."""
        while True:
            try:
                with self._lock:
                    return self._tls.read(most)
            except ssl.SSLWantReadError:
                data = received(self._connection, RECEIVED_AT_ONCE)
            except ssl.SSLError as error:
                raise Tampered(f"what it sent was changed on its way: {error.reason}") from error
            if not data:
                return b""
            with self._lock:
                self._received.write(data)

    def settimeout(self, seconds: float | None) -> None:
        self._connection.settimeout(seconds)

    def getpeername(self) -> Any:
        return self._connection.getpeername()

    def shutdown(self, how: int) -> None:
        self._connection.shutdown(how)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Connection = socket.socket | TlsConnection


def received(connection: Connection, most: int) -> bytes:
    """What is there, up to `most` bytes; empty at the end. A process that is killed with bytes
    unread resets its connections: that is their end, too."""
    try:
        return connection.recv(most)
    except ConnectionResetError:
        return b""


def tls_context(secret: bytes, *, calls: bool) -> ssl.SSLContext:
    """For either end: it presents the certificate of the secret, and demands the same."""
    certificate, key = derive_certificate(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if not calls:
        context.num_tickets = 0  # every connection proves the secret
    _load(context, certificate + key)
    return context


@lru_cache(maxsize=4)  # callers retry
def derive_certificate(secret: bytes) -> tuple[bytes, bytes]:
    """The certificate of a secret and its private key, as PEM. A signature of Ed25519 depends on
    key and content alone, and DER has one encoding: the same secret gives the same bytes."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.x509.oid import NameOID

    seed = HKDF(hashes.SHA256(), 32, salt=None, info=LABEL).derive(secret)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    # Without extensions it is no authority: nothing else can be verified by it.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """By memory that has a path, as ssl reads files only: the key is on no disk."""
    with open(os.memfd_create("moesaic-key", os.MFD_CLOEXEC), "wb") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
