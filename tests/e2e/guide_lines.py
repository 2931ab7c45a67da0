"""Command lines of the expert-parallelism guide as they stand there, but for the module's name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace

MODELS = ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.1")
MASTER = "<MASTER_NODE_IP>"


@dataclass(frozen=True)
class Deployment:
    """The lines of one section, one for each node that it shows. Where it shows fewer than
    `nodes`, the others run the first line with their own --node-rank."""

    name: str
    lines: tuple[str, ...]
    nodes: int = 1
    ranks: int = 8
    environment: dict[str, str] = field(default_factory=dict)

    def commands(self, model: str, master: str) -> list[list[str]]:
        """What each node runs, split into words."""
        return [
            [word.replace(MASTER, master) for word in _words(self._line(node), model)]
            for node in range(self.nodes)
        ]

    def _line(self, node: int) -> str:
        if node < len(self.lines):
            return self.lines[node]
        line = self.lines[0].replace("--node-rank 0", f"--node-rank {node}")
        assert line != self.lines[0], "the line names no node"
        return line


def _words(line: str, model: str) -> list[str]:
    """As a shell splits it: a backslash joins lines and # begins a comment."""
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    place = words.index("--model-path") + 1
    assert words[place] in MODELS
    return [*words[:place], model, *words[place + 1 :]]


BASIC = Deployment(
    "basic setup",
    (
        r"""
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 8 \
  --ep 8 \
  --moe-a2a-backend deepep \
  --moe-runner-backend deep_gemm
""",
    ),
)
MULTI_NODE = Deployment(
    "multi-node setup",
    (
        r"""
# Node 0
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 16 --ep 16 \
  --nnodes 2 --node-rank 0 \
  --dist-init-addr <MASTER_NODE_IP>:29500 \
  --moe-a2a-backend deepep \
  --moe-runner-backend deep_gemm
""",
        r"""
# Node 1
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 16 --ep 16 \
  --nnodes 2 --node-rank 1 \
  --dist-init-addr <MASTER_NODE_IP>:29500 \
  --moe-a2a-backend deepep \
  --moe-runner-backend deep_gemm
""",
    ),
    nodes=2,
    ranks=16,
)
# Not in the guide: the one above on a quarter of the ranks, for every run of the tests.
TWO_SMALL_NODES = Deployment(
    "multi-node setup, 4 ranks",
    tuple(line.replace("--tp 16 --ep 16", "--tp 4 --ep 4") for line in MULTI_NODE.lines),
    nodes=2,
    ranks=4,
)
MODES = Deployment(
    "DeepEP dispatch modes",
    (
        r"""
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 8 --ep 8 \
  --moe-a2a-backend deepep \
  --deepep-mode auto  # Automatically switches between modes
""",
    ),
)
EP_TP = Deployment(
    "EP + TP",
    (
        r"""
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 8 --ep 8 \
  --moe-a2a-backend deepep
""",
    ),
)
EP_DPA = Deployment(
    "EP + DPA",
    (
        r"""
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 8 --ep 8 \
  --dp-size 8 \
  --enable-dp-attention \
  --moe-a2a-backend deepep \
  --moe-runner-backend deep_gemm
""",
    ),
)
# The guide's line says nothing about where the nodes meet: the environment does.
EP_PP = Deployment(
    "EP + PP",
    (
        r"""
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3.1 \
  --tp 8 --ep 8 \
  --pp-size 4 \
  --nnodes 4 --node-rank 0 \
  --moe-a2a-backend deepep \
  --chunked-prefill-size 4096
""",
    ),
    nodes=4,
    ranks=32,
    environment={"MASTER_ADDR": MASTER, "MASTER_PORT": "29500"},
)
EP_IS_TP = Deployment(
    "troubleshooting: ep == tp",
    (
        r"""
# DeepEP requires ep == tp
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 8 --ep 8 \
  --moe-a2a-backend deepep
""",
    ),
)
HYBRID = Deployment(
    "troubleshooting: hybrid EP + TP",
    (
        r"""
# For hybrid EP+TP (ep < tp), use 'none' backend
python -m moesaic.launch_server \
  --model-path deepseek-ai/DeepSeek-V3 \
  --tp 8 --ep 4 \
  --moe-a2a-backend none
""",
    ),
)
# Not in the guide: the same with 2 ranks in a stage, which share a GPU with the others.
SMALL_EP_PP = replace(
    EP_PP,
    lines=tuple(line.replace("--tp 8 --ep 8", "--tp 2 --ep 2") for line in EP_PP.lines),
    ranks=8,
)
ALWAYS = (TWO_SMALL_NODES,)
SLOW = (EP_DPA, BASIC, MULTI_NODE, MODES, EP_TP, EP_PP, EP_IS_TP, HYBRID)
ON_ONE_GPU = (TWO_SMALL_NODES, SMALL_EP_PP, EP_TP, HYBRID)
