"""What a start with sizes that do not fit advises."""

from dataclasses import replace

import pytest

from moesaic.config.args import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.engine.setup.memory_plan import check_plan
from moesaic.models.locate import model_folder


def test_no_flags_of_the_experts_where_attention_cannot_be_split() -> None:
    args = resolve(ServerArgs(model_path="tiny:qwen3_moe", tp_size=3, device="cpu"))
    with pytest.raises(ValueError, match="cannot be split over 3 ranks") as caught:
        check_plan(replace(args, model_path=model_folder(args)))
    assert "--ep-size" not in str(caught.value)
