"""The store of a service as a store of torch.distributed, for gloo and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    Store,
)

from moesaic.comm.network.store import StoreClient

T = TypeVar("T")


class TorchStore(Store):
    """torch calls these from C++: keep this object as long as what uses it. `get` and `wait` raise
    if a key is missing after `seconds` or the store is gone."""

    def __init__(self, client: StoreClient, prefix: str, seconds: float) -> None:
        super().__init__()
        self._client, self._prefix, self._seconds = client, prefix, seconds

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        _reach(lambda: self._client.set(self._name(key), data))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = _reach(lambda: self._client.get_now([self._name(key)]))[0]
        if value is None:
            raise DistStoreError(f"{key!r} was deleted while it was read")
        return value

    def check(self, keys: list[str]) -> bool:
        return _reach(lambda: self._client.has([self._name(key) for key in keys]))

    def add(self, key: str, value: int) -> int:
        return _reach(lambda: self._client.add(self._name(key), value))

    def delete_key(self, key: str) -> bool:
        return _reach(lambda: self._client.delete(self._name(key)))

    def num_keys(self) -> int:
        return _reach(self._client.count)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        names = [self._name(key) for key in keys]
        missing = _reach(lambda: self._client.wait(names, seconds))
        if missing:
            raise DistStoreError(f"{missing} did not come within {seconds:g} s")

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _reach(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except OSError as error:
        raise DistNetworkError(f"the store cannot be reached: {error}") from error
