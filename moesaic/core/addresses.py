"""Network addresses as text."""


def host_and_port(host: str, port: int | str) -> str:
    """HOST:PORT; an IPv6 address, with brackets or without, gets them: [fd00::1]:29500."""
    bare = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if bare else f"{host}:{port}"


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT with a port from 1 to 65535; IPv6 hosts are in brackets."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", " ")
    named = bool(bare) and not any(letter.isspace() or letter in "[]/" for letter in bare)
    return named and port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
