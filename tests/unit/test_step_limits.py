"""The limits that benchmarks compare with."""

import pytest

from bench.step_limits import Ceilings, Forward, ModelLimit, distinct_experts

H200 = Ceilings(4.3e12, 790e12, 1185e12)
QWEN3_30B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [],
}
BATCHES = (1, 8, 32, 128, 256)
PUBLISHED = {
    False: (1.44, 6.21, 13.14, 17.24, 20.65),
    True: (0.81, 3.28, 7.04, 10.29, 13.71),
}


@pytest.mark.parametrize("fp8", PUBLISHED)
def test_limits_of_a_known_model(fp8):
    limit = ModelLimit(QWEN3_30B, H200, fp8)
    found = [1e3 * limit.seconds(Forward.decode(batch, 1088)) for batch in BATCHES]
    assert found == pytest.approx(PUBLISHED[fp8], rel=0.005)


def test_prompts_are_limited_by_operations():
    prompts = Forward.prefill(16, 1024)
    assert (prompts.tokens, prompts.sampled, prompts.pairs) == (16384, 16, 16384 * 512.5)
    seconds = ModelLimit(QWEN3_30B, H200).seconds(prompts)
    assert prompts.tokens / seconds == pytest.approx(129_000, rel=0.06)


def test_what_other_models_have():
    plain = ModelLimit(QWEN3_30B, H200)
    decode = Forward.decode(4, 1000)
    dense = ModelLimit(QWEN3_30B | {"mlp_only_layers": [0, 1]}, H200)
    # Two layers whose MLP is 6144 wide, instead of experts of 768 each and their router.
    touched = distinct_experts(128, 8, 4)
    less = (touched * 768 - 6144) * 3 * 2048 * 2 + 128 * 2048 * 2
    saved = plain.seconds(decode) - dense.seconds(decode)
    assert saved == pytest.approx(2 * less / 4.3e12)
    kinds = ["sliding_attention", "full_attention"] * 24
    windowed = ModelLimit(QWEN3_30B | {"layer_types": kinds, "sliding_window": 100}, H200)
    saved = plain.seconds(decode) - windowed.seconds(decode)
    assert saved == pytest.approx(24 * 4 * 900 * 2 * 4 * 128 * 2 / 4.3e12)


def test_compressed_keys_and_values():
    config = {
        "vocab_size": 1024,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
    }
    projections = 2 * 24 * 64 + 40 * 64 + 2 * 32 * 32 + 64 * 32
    experts = 8 * 64 + (2 + 1) * 3 * 16 * 64
    numbers = projections + experts + 1024 * 64 + 100 * 40
    limit = ModelLimit(config, Ceilings(1.0, 1e9, 1e9))
    assert limit.seconds(Forward.decode(1, 100)) == pytest.approx(2 * numbers)
    with pytest.raises(ValueError, match="no experts"):
        ModelLimit({"hidden_size": 64, "num_experts_per_tok": 2}, H200)
