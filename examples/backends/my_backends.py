"""Brings `gloo`, `ring` and `loop`: importing this module registers them.

    moesaic generate --model-path tiny:qwen3_moe --prompt Hello \\
        --moe-backend-module examples.backends.my_backends \\
        --moe-a2a-backend ring --moe-runner-backend loop
"""

import examples.backends.loop
import examples.backends.ring  # noqa: F401
