"""The outside oracle: tiny random checkpoints made by Hugging Face transformers, and what it says.

A `Case` is one model shape. `build` writes it as a checkpoint folder with transformers' classes;
`Oracle` runs transformers on it in float32 with eager attention.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

POSITIONS = 512
SHARED_PREFIX = 96
# Page and chunk borders, window borders, and the extremes; 32 lengths between 1 and 300.
LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40, 47]
LENGTHS += [48, 63, 64, 65, 97, 100, 112, 128, 129, 144, 160, 177, 200, 256, 299, 300]


@dataclass(frozen=True)
class Case:
    """One model shape. `old_config` rewrites config.json as transformers 4 wrote it."""

    name: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    old_config: bool = False
    sharded: bool = False


CONFIGS: dict[str, type[PretrainedConfig]] = {
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "gpt_oss": GptOssConfig,
}

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
}


def yarn(**changes: Any) -> dict[str, Any]:
    base = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    return base | {"original_max_position_embeddings": 128} | changes


def scaled(rope_type: str, **changes: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 3.0} | changes


LLAMA3 = scaled(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "deepseek_v2": MLA
    | {
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707),
    },
    "deepseek_v3": MLA
    | {
        "num_hidden_layers": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0),
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_local_experts": 10,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
    },
}

# Seeds are those for which no greedy choice and no routing of the 32 prompts is near a tie.
MAIN_SEEDS = {"qwen2_moe": 1, "qwen3_moe": 1, "deepseek_v2": 1}
MAIN_CASES = [Case(family, family, seed=MAIN_SEEDS.get(family, 0)) for family in FAMILIES]

ODD_CASES = [
    Case(
        "mixtral_five_experts_one_kv_head_tied",
        "mixtral",
        {"num_local_experts": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    Case("mixtral_sliding_window", "mixtral", {"sliding_window": 24}, seed=1, old_config=True),
    Case("mixtral_top_1", "mixtral", {"num_experts_per_tok": 1, "num_local_experts": 7}),
    Case("mixtral_all_experts", "mixtral", {"num_experts_per_tok": 4, "num_local_experts": 4}),
    Case(
        "mixtral_wide_heads_linear_rope",
        "mixtral",
        {"head_dim": 32, "rope_parameters": scaled("linear")},
        seed=1,
        sharded=True,
    ),
    Case(
        "qwen2_moe_partly_dense",
        "qwen2_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
        },
        old_config=True,
    ),
    Case(
        "qwen2_moe_seven_experts_no_bias_tied",
        "qwen2_moe",
        {
            "num_experts": 7,
            "num_key_value_heads": 1,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "qwen2_moe_sliding_layers",
        "qwen2_moe",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    ),
    Case(
        "qwen2_moe_yarn",
        "qwen2_moe",
        {"rope_parameters": yarn()},
        seed=1,
        old_config=True,
        sharded=True,
    ),
    Case(
        "qwen3_moe_partly_dense_top_1_bias",
        "qwen3_moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
        seed=2,
        old_config=True,
    ),
    Case(
        "qwen3_moe_sliding_window",
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 17, "norm_topk_prob": False},
        seed=2,
    ),
    Case(
        "qwen3_moe_llama3_rope_one_kv_head",
        "qwen3_moe",
        {"rope_parameters": LLAMA3, "num_key_value_heads": 1, "num_experts": 5},
        seed=1,
        sharded=True,
    ),
    Case(
        "qwen3_moe_dynamic_rope_tied",
        "qwen3_moe",
        {"rope_parameters": scaled("dynamic"), "tie_word_embeddings": True},
        seed=6,
    ),
    Case(
        "deepseek_v2_lite",
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "n_routed_experts": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        old_config=True,
    ),
    Case(
        "deepseek_v2_all_moe_bias_mscale",
        "deepseek_v2",
        {
            "first_k_dense_replace": 0,
            "attention_bias": True,
            "n_shared_experts": 1,
            # MLA's inner norms keep 1e-6 whatever this says.
            "rms_norm_eps": 0.05,
            "rope_parameters": yarn(mscale=1.0, mscale_all_dim=0.4, beta_fast=16, beta_slow=2),
        },
        sharded=True,
    ),
    Case(
        "deepseek_v3_one_group_plain_q",
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 11,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        old_config=True,
        sharded=True,
    ),
    Case(
        "deepseek_v3_groups_of_seven_half_rope_tied",
        "deepseek_v3",
        {
            "n_routed_experts": 14,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 3,
            "n_shared_experts": 2,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        seed=3,
    ),
    Case("deepseek_v2_no_shared_expert", "deepseek_v2", {"n_shared_experts": 0}),
    Case(
        "gpt_oss_all_experts_custom_layers_tied",
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 5,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        old_config=True,
        sharded=True,
    ),
    Case(
        "gpt_oss_top_1_tight_clamp_no_bias",
        "gpt_oss",
        {
            "num_experts_per_tok": 1,
            "num_local_experts": 7,
            "swiglu_limit": 1.0,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        seed=4,
    ),
]

CASES = {case.name: case for case in MAIN_CASES + ODD_CASES}


def make_model(case: Case) -> PreTrainedModel:
    config = CONFIGS[case.family](**(COMMON | FAMILIES[case.family] | case.changes))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    spread_weights(model, case.seed)
    return told_the_limit(model).eval()


def told_the_limit(model: PreTrainedModel) -> PreTrainedModel:
    """Some versions of transformers (5.17 is one) clamp gpt-oss's activations at 7 whatever the
    config says."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = getattr(model.config, "swiglu_limit", module.limit)
    return model


def spread_weights(model: PreTrainedModel, seed: int) -> None:
    """Replace every tensor so that routing, attention and logits are spread out, nothing near 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    # Rotary tables are buffers too, and are not saved.
    tensors |= {k: v for k, v in model.named_buffers() if k in model.state_dict()}
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(spread(name, noise, model.config))


def spread(name: str, noise: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith(("bias", "sinks")):
        return 0.5 * noise
    # gpt-oss stores experts as [expert, in, out].
    transposed = config.model_type == "gpt_oss" and "experts" in name
    # An absent shared expert is saved as tensors with a dimension of zero.
    fan_in = max(1, noise.shape[1] if transposed else noise.shape[-1])
    if "embed_tokens" in name:
        return noise if not config.tie_word_embeddings else 4 * noise * fan_in**-0.5
    gain = 4.0 if "lm_head" in name else 2.0 if "gate.weight" in name or "router" in name else 1.4
    return gain * noise * fan_in**-0.5


def build(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the case's checkpoint into `folder`."""
    model = make_model(case).to(dtype)
    model.save_pretrained(folder, max_shard_size="200KB" if case.sharded else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == case.sharded
    if case.old_config:
        write_old_config(folder)
    return folder


def write_old_config(folder: Path) -> None:
    """Rewrite config.json as transformers 4 and today's hub checkpoints have it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.44.0"
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"].startswith("deepseek"):
        for key in ("head_dim", "qk_head_dim", "rope_interleave"):
            config.pop(key, None)
        config |= {"moe_layer_freq": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001}
    if config["model_type"] == "deepseek_v3":
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if config["model_type"] == "qwen2_moe":
        config.pop("layer_types")
    path.write_text(json.dumps(config, indent=2))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return told_the_limit(model).eval()


def make_prompts(
    vocab_size: int, seed: int = 0, lengths: list[int] | None = None
) -> list[list[int]]:
    """Random prompts; every second one that is long enough starts with one shared prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(SHARED_PREFIX)]
    prompts = []
    for index, length in enumerate(LENGTHS if lengths is None else lengths):
        prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
        if index % 2 and length > SHARED_PREFIX:
            prompt[:SHARED_PREFIX] = shared
        prompts.append(prompt)
    rng.shuffle(prompts)
    return prompts


@dataclass(frozen=True)
class Divergence:
    """The first output token that is not transformers' choice, and how close that choice was."""

    index: int
    expected: int
    got: int
    top2_margin: float


class Oracle:
    """What transformers says about token sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._routed: dict[tuple[int, ...], torch.Tensor] = {}
        self._choices: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            if "Router" in type(module).__name__:
                module.register_forward_hook(partial(self._keep_choice, int(name.split(".")[2])))

    def _keep_choice(self, layer: int, module: object, args: object, output: Any) -> None:
        self._choices[layer] = output[2]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Float32 logits [len, V] of one forward over the whole sequence, without a cache."""
        key = tuple(ids)
        if key not in self._logits:
            with torch.inference_mode():
                out = self.model(input_ids=torch.tensor([ids]), use_cache=False)
            self._logits[key] = out.logits[0].float()
            config = self.model.config
            none = torch.zeros(len(ids), config.num_experts_per_tok, dtype=torch.int64)
            choices = [self._choices.get(n, none) for n in range(config.num_hidden_layers)]
            self._routed[key] = torch.stack(choices, 1)
        return self._logits[key]

    def routed(self, ids: list[int]) -> torch.Tensor:
        """The experts [len, layers, K] that its routers choose; zeros in layers without one."""
        self.logits(ids)
        return self._routed[tuple(ids)]

    def all_logprobs(self, ids: list[int]) -> torch.Tensor:
        return self.logits(ids).log_softmax(-1)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Logprob [len - 1] of every token after the first."""
        return self.all_logprobs(ids)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]

    def greedy_divergence(self, prompt: list[int], output: list[int]) -> Divergence | None:
        """Teacher forcing: output is greedy iff each token is the argmax given those before it."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1]
        top = logits.topk(2)
        for index, (got, expected) in enumerate(
            zip(output, top.indices[:, 0].tolist(), strict=True)
        ):
            if got != expected:
                margin = top.values[index, 0] - top.values[index, 1]
                return Divergence(index, expected, got, float(margin))
        return None

    def generate(self, prompt: list[int], length: int) -> list[int]:
        """transformers' own greedy loop, with its cache, ignoring end-of-sequence tokens."""
        with torch.inference_mode():
            ids = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=length,
                min_new_tokens=length,
                eos_token_id=None,
                pad_token_id=0,
            )
        result: list[int] = ids[0, len(prompt) :].tolist()
        return result


def fragile_routings(model: PreTrainedModel, ids: list[int], noise: float = 4e-6) -> int:
    """How many (token, layer) routings change under float32-sized noise on the router's input.

    A sequence with such a routing cannot tell a wrong engine from rounding; tests choose others.
    """
    changed = 0
    generator = torch.Generator().manual_seed(0)

    def check(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> None:
        nonlocal changed
        chosen = output[2].sort(-1).values
        for _ in range(4):
            factor = 1 + noise * torch.randn(args[0].shape, generator=generator)
            again = module.forward(args[0] * factor)[2].sort(-1).values
            changed += int((again != chosen).any(-1).sum())

    routers = [m for m in model.modules() if "Router" in type(m).__name__]
    hooks = [m.register_forward_hook(check) for m in routers]
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return changed
