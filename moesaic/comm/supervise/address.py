"""Addresses of nodes, and the check of --dist-init-addr. No torch here."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from moesaic.comm.network.node_secret import check_is_secret
from moesaic.comm.supervise.service_spec import ServiceSpec, split_address
from moesaic.core.addresses import host_and_port

logger = logging.getLogger(__name__)

SIOCGIFADDR: Final = 0x8915
NAME_SECONDS: Final = 1.0
BACKLOG: Final = 128


def check_init_address(
    node_rank: int, address: str, secret: bytes, own: str = "", name_timeout: float = 0.0
) -> None:
    """Raises ValueError, with the fix, if nodes cannot connect there, or if all could for lack of a
    secret. `own`: the address of this node; detected if empty. The name has `name_timeout` seconds
    to become known."""
    name, port = split_address(address)
    wait_for_name(name, name_timeout)
    host = numeric(name)
    if ipaddress.ip_address(host).is_unspecified:
        advice = _advice(port) if node_rank == 0 else "give an address of node 0"
        raise ValueError(f"--dist-init-addr {address}: other nodes cannot connect to it; {advice}")
    if node_rank == 0:
        _check_own(address, host, port)
        if ipaddress.ip_address(host).is_loopback and name not in (host, "localhost"):
            raise ValueError(
                f"--dist-init-addr {address}: node 0 knows this name as {host}, which other nodes "
                f"cannot reach; {_advice(port)}"
            )
    else:
        try:
            own = own or address_towards(host, port)
        except OSError as error:
            raise ValueError(
                f"--dist-init-addr {address}: this machine has no route to it ({error}); give an "
                "address of node 0 that this one reaches"
            ) from None
    check_is_secret(secret, host, own or host)


def numeric(host: str) -> str:
    """Resolves a name, since a socket is bound to an address."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--dist-init-addr: the name {host!r} has no address ({error}): give the address of "
            "node 0, or a name that all nodes know"
        ) from None


def numeric_or_name(host: str) -> str:
    """Returns the name itself if it has no address now: a lost node may get one again later."""
    try:
        return numeric(host)
    except ValueError:
        return host


def wait_for_name(host: str, seconds: float) -> None:
    """Returns when the name has an address, or after that time. Kubernetes publishes the name of a
    pod some seconds after the pod has started."""
    deadline, told = time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        try:
            numeric(host)
            return
        except ValueError:
            if not told:
                logger.info("the name %r has no address yet: waiting up to %g s", host, seconds)
            told = True
            time.sleep(min(NAME_SECONDS, max(0.0, deadline - time.monotonic())))


def address_towards(host: str, port: int) -> str:
    """This machine's address as a host sees it; no packet is sent."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def address_towards_first(hosts: Sequence[tuple[str, int]]) -> str:
    """The same, of the first host whose name is known and to which there is a route."""
    for host, port in hosts[:-1]:
        with suppress(OSError):
            return address_towards(host, port)
    return address_towards(*hosts[-1])


def listen(spec: ServiceSpec) -> tuple[str, socket.socket]:
    """The address of a node that leads, and the socket at which the others reach it there."""
    host, port = spec.heads[spec.node_rank]
    host = numeric(host)
    if spec.listening < 0:
        return host, socket.create_server((host, port), family=family_of(host), backlog=BACKLOG)
    listening = socket.socket(fileno=spec.listening)
    listening.listen(BACKLOG)
    return host, listening


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def interfaces() -> list[tuple[str, str]]:
    """The interfaces of this machine and their addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            address, *_, name = line.split()
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(address)))))
    return found


def interface_of(address: str) -> str:
    """The interface that has an address; empty if that is not found out."""
    return next((name for name, found in interfaces() if found == address), "")


def own_addresses() -> list[str]:
    """The addresses of this machine, those that other nodes may reach first."""
    addresses = [one for _, one in interfaces()]
    usable = [one for one in addresses if not ipaddress.ip_address(one).is_link_local]
    return sorted(usable, key=lambda one: ipaddress.ip_address(one).is_loopback)


def _check_own(address: str, host: str, port: int) -> None:
    """Binds without listening, so that no node can connect to it yet."""
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            ours = error.errno != errno.EADDRNOTAVAIL
            advice = "give another port, the same on all nodes" if ours else _advice(port)
            raise ValueError(
                f"--dist-init-addr {address}: node 0 cannot listen there "
                f"({error.strerror or error}); {advice}"
            ) from None


def _advice(port: int) -> str:
    shown = [host_and_port(one, port) for one in own_addresses()]
    return f"give an address of node 0; this machine has {', '.join(shown)}"
