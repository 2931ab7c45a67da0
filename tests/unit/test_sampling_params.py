"""SamplingParams: defaults, what is taken, and what is refused with which words."""

import math
import subprocess
import sys

import msgspec
import pytest

from moesaic.core.sampling import SamplingParams


def test_defaults():
    params = SamplingParams()
    assert (params.max_new_tokens, params.min_new_tokens, params.n) == (128, 0, 1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert (params.frequency_penalty, params.presence_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.stop, params.stop_token_ids, dict(params.logit_bias)) == ((), (), {})
    assert (params.ignore_eos, params.skip_special_tokens, params.no_stop_trim) == (0, 1, 0)
    assert params.sampling_seed is None
    assert SamplingParams.from_dict(None) == SamplingParams.from_dict({}) == params


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"max_new_tokens": None}, "max_new_tokens", None),
        ({"max_new_tokens": 0}, "max_new_tokens", 0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": None}, "temperature", 1.0),
        ({"stop": "END"}, "stop", ("END",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [3, 1]}, "stop_token_ids", (3, 1)),
        ({"seed": 7}, "sampling_seed", 7),
        ({"sampling_seed": 2**63 - 1}, "sampling_seed", 2**63 - 1),
        ({"logit_bias": {"12": 1, 3: -2.5}}, "logit_bias", {12: 1.0, 3: -2.5}),
        ({"top_p": 1}, "top_p", 1.0),
        ({"json_schema": None, "regex": None}, "top_k", -1),
        ({"spaces_between_special_tokens": True}, "top_k", -1),
    ],
)
def test_accepted(given, name, value):
    assert getattr(SamplingParams.from_dict(given), name) == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "unknown sampling parameter 'temprature': did you mean 'temperature'"),
        ({"max_tokens": 1}, "or max_new_tokens in sampling_params to /generate"),
        ({"structural_tag": "a"}, "structural_tag is not supported: give response_format"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens is not supp"),
        ({"temperature": -0.1}, "temperature=-0.1 .* 0 \\(greedy\\) or more"),
        ({"temperature": math.nan}, "temperature=nan .* finite"),
        ({"temperature": math.inf}, "temperature=inf .* finite"),
        ({"temperature": "hot"}, "temperature='hot' .* number, not str"),
        ({"temperature": True}, "temperature=True .* not bool"),
        ({"top_p": 0}, "top_p=0.0 .* \\(0, 1\\]"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_k": 0}, "top_k=0 .* -1 to keep every token"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 5.0}, "top_k=5.0 .* integer, not float"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 .* null .in Python None. for no limit"),
        ({"max_new_tokens": True}, "max_new_tokens=True .* not bool"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5 .* max_new_tokens=4"),
        ({"frequency_penalty": 2.1}, "frequency_penalty=2.1 .* \\[-2, 2\\]"),
        ({"presence_penalty": -2.1}, "presence_penalty=-2.1"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0.0 .* \[0.01, 2\]"),
        ({"repetition_penalty": 2.5}, "repetition_penalty=2.5"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300"),
        ({"logit_bias": {"3": 1e300}}, r"logit_bias\[3\]=1e\+300 .* at most 1e\+06"),
        ({"top_k": 2**70}, "top_k=1180591620717411303424 .* less than 2147483648"),
        ({"max_new_tokens": 2**31}, "max_new_tokens=2147483648"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids=18446744073709551616"),
        ({"stop": ["a\ud800"]}, "half of a character"),
        ({"n": 0}, "n=0"),
        ({"stop": ["a", ""]}, "stop='' .* at least one character"),
        ({"stop": 5}, "stop=5"),
        ({"stop": [5]}, "stop=5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
        ({"stop_token_ids": [True]}, "stop_token_ids=True"),
        ({"stop_token_ids": 3}, "stop_token_ids=3 .* list"),
        ({"ignore_eos": 1}, "ignore_eos=1 .* true or false"),
        ({"logit_bias": [1]}, "logit_bias=a list of 1 .* mapping"),
        ({"logit_bias": {"x": 1}}, "logit_bias='x'"),
        ({"logit_bias": {-1: 1}}, "logit_bias=-1"),
        ({"logit_bias": {1: math.inf}}, "logit_bias\\[1\\]=inf"),
        ({"seed": -1}, "sampling_seed=-1"),
        ({"seed": 2**63}, "sampling_seed=9223372036854775808"),
        ({"seed": 1.5}, "sampling_seed=1.5"),
        ({"seed": 1, "sampling_seed": 1}, "are the same"),
    ],
)
def test_refused(given, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams.from_dict(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stop_token_ids": (99, 100)}, "stop_token_ids=100 .* \\[0, 100\\)"),
        ({"logit_bias": {100: 1.0}}, "logit_bias=100"),
        ({"stop_token_ids": (99,), "logit_bias": {99: 1.0}}, None),
    ],
)
def test_check_vocab(given, words):
    params = SamplingParams(**given)
    if words is None:
        params.check_vocab(100)
    else:
        with pytest.raises(ValueError, match=words):
            params.check_vocab(100)


@pytest.mark.parametrize(
    ("given", "greedy", "penalised"),
    [
        ({}, False, False),
        ({"temperature": 0}, True, False),
        ({"temperature": 1e-9}, True, False),
        ({"temperature": 1e-3, "presence_penalty": 0.1}, False, True),
        ({"top_k": 1, "repetition_penalty": 1.1}, True, True),
        ({"frequency_penalty": -1}, False, True),
    ],
)
def test_properties(given, greedy, penalised):
    params = SamplingParams.from_dict(given)
    assert (params.greedy, params.penalised) == (greedy, penalised)


def test_is_frozen_hashable_and_travels():
    params = SamplingParams.from_dict({"stop": "x", "logit_bias": {"5": 1}, "seed": 3, "top_k": 9})
    with pytest.raises(AttributeError):
        params.n = 2
    assert hash(params) == hash(SamplingParams.from_dict({"stop": "x", "seed": 3, "top_k": 9}))
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(params), type=SamplingParams) == params


def test_does_not_import_torch():
    code = "import sys, moesaic.core.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
