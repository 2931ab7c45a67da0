"""ollama: its API is not offered, and the refusal says so."""

from __future__ import annotations

from typing import Any

import pytest
from ollama import Client, ResponseError


def test_refusals(house: Any) -> None:
    client = Client(host=house.url)
    calls: list[Any] = [
        lambda: client.chat(house.model, messages=[{"role": "user", "content": "Hello"}]),
        lambda: client.generate(house.model, prompt="Hello"),
        lambda: client.embed(house.model, input="Hello"),
        client.list,
    ]
    for call in calls:
        with pytest.raises(ResponseError) as refused:
            call()
        assert refused.value.status_code == 404
        assert "Ollama" in str(refused.value) and "/v1" in str(refused.value)
