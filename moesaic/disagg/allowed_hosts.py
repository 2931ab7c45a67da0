"""The prefill instances that a decode instance connects to: requests name them, so that without a
bound a client could make it connect to anything that it reaches."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

from moesaic.comm.supervise.address import numeric
from moesaic.config import ServerArgs

FLAG: Final = "--disaggregation-bootstrap-allow"
LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
# Without link-local addresses, at which clouds have their metadata.
PRIVATE: Final = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def bootstrap_hosts(args: ServerArgs) -> tuple[str, ...]:
    """What AllowedHosts is made of: the flag, or networks. An instance on loopback gets nothing
    from other machines, so it asks none of them; one that continues no requests asks nobody."""
    if args.disaggregation_mode != "decode":
        return ()
    if args.disaggregation_bootstrap_allow is not None:
        return args.disaggregation_bootstrap_allow
    own = ipaddress.ip_address(numeric(args.host).partition("%")[0])
    return LOOPBACK if own.is_loopback and args.nnodes == 1 else LOOPBACK + PRIVATE


class AllowedHosts:
    """`entries`: addresses, networks, and names, which may have any address."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries, self._networks, self._names = entries, [], set[str]()
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                self._names.add(entry.lower().rstrip("."))

    def refusal(self, host: str) -> str:
        """Why it is not connected to, if that is known without a lookup."""
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return ""
        return "" if self._has(host, address) else self._why(host)

    def connect(self, host: str, port: int, seconds: float) -> socket.socket:
        """To an allowed address of the host; OSError if there is none."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        allowed = [
            address
            for address in addresses
            if self._has(host, ipaddress.ip_address(address.partition("%")[0]))
        ]
        if not allowed:
            shown = host if host in addresses else f"{host}, which is {' and '.join(addresses)}"
            raise PermissionError(self._why(shown))
        for address in allowed[:-1]:
            try:
                return socket.create_connection((address, port), seconds)
            except OSError:
                continue
        return socket.create_connection((allowed[-1], port), seconds)

    def _has(self, host: str, address: Address) -> bool:
        plain = getattr(address, "ipv4_mapped", None) or address
        is_named = host.lower().rstrip(".") in self._names
        return is_named or any(plain in network for network in self._networks)

    def _why(self, host: str) -> str:
        listed = ", ".join(self._entries)
        return f"this instance does not connect to {host}, only to {listed}: see {FLAG}"
