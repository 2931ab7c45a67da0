"""Network addresses as text."""


def host_and_port(host: str, port: int | str) -> str:
    """HOST:PORT; an IPv6 address, with brackets or without, gets them: [fd00::1]:29500."""
    bare = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if bare else f"{host}:{port}"
