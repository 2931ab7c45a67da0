"""SGLang's names for the formats of tool calls and reasoning."""

from typing import Final

TOOL_PARSERS: Final = (
    "qwen25",
    "qwen",
    "hermes",
    "qwen3_coder",
    "mistral",
    "deepseekv3",
    "deepseekv31",
    "kimi_k2",
    "gpt-oss",
)
# SGLang's other names.
OTHER_TOOL_PARSERS: Final = tuple(
    "apertus2509 beam cohere_command4 deepseekv32 deepseekv4 deepseekv41 dots gemma4 gigachat3 "
    "gigachat35 glm glm45 glm47 hunyuan inkling interns1 iquest_q1 k2_horizon kimi_k3 lfm2 ling3 "
    "llama3 mimo minicpm5 minimax-m2 minimax-m3 muse nanbeige poolside_v1 pythonic "
    "response_template spark25 step3 step3p5 trinity".split()
)
OTHER_REASONING_PARSERS: Final = tuple(
    "apertus2509 beam cohere_command4 deepseek-v4 deepseek-v41 dots gemma4 gigachat35 glm45 "
    "granite_thinking_parser hunyuan inkling interns1 iquest_q1 k2_horizon kimi_k3 ling3 mimo "
    "minimax minimax-append-think minimax-m3 mistral muse nanbeige nemotron_3 poolside_v1 "
    "response_template step3 step3p5".split()
)
REASONING_PARSERS: Final = (
    "deepseek-r1",
    "deepseek-v3",
    "qwen3",
    "qwen3-thinking",
    "kimi",
    "kimi_k2",
    "gpt-oss",
)
