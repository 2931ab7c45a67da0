"""How often the MTP layer foresees the main model's next but one token, on held-out problems.

    python -m bench.mtp                          # models/house-moe, 50 problems of each task
    python -m bench.mtp --model-path DIR --num 200 --dtype float32
    python -m bench.mtp --num 2 --out small.json     # a smaller run replaces nothing unless --again

The main model answers greedily. Then one pass over prompt and reply gives, for every token of the
reply but the first, what the MTP layer would have drafted for it from what was known two tokens
before. A draft that equals the reply's token would have been accepted: with one draft token a step
yields one token and, as often as that, a second one.

T tokens · H hidden · V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bench.common import RESULTS, machine, print_table, spare_larger
from moesaic import Engine
from moesaic.evals.data import write_whole
from moesaic.evals.tasks.draw import TASKS, distinct
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.blocks import CausalLM
from moesaic.models.config import DTYPES, BuildContext, RawConfig, checkpoint_dtype
from moesaic.models.nextn import NextN, load_nextn
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.models.tiny import materialise
from moesaic.models.weights import load_weights, sync_input_scales
from moesaic.moe.context import MoeContext

PAGE = 16
BATCH_TOKENS = 4096
MAX_NEW_TOKENS = 384


@dataclass(frozen=True)
class Reply:
    prompt_ids: list[int]
    reply_ids: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.reply_ids

    @property
    def drafts(self) -> range:
        """Rows from which a token of the reply is drafted: the first row has read the prompt and
        is told the reply's first token."""
        return range(len(self.prompt_ids) - 1, len(self.ids) - 2)


@dataclass(frozen=True)
class Score:
    problems: int
    tokens: int
    drafts: int
    right: int

    @classmethod
    def total(cls, scores: Iterable[Score]) -> Score:
        return cls(*map(sum, zip(*map(astuple, scores), strict=True)))

    @property
    def share(self) -> float:
        return self.right / self.drafts if self.drafts else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share, "accepted_length": 1 + self.share}


@dataclass(frozen=True)
class Models:
    main: CausalLM
    mtp: NextN

    @classmethod
    def load(cls, folder: Path, dtype: str) -> Models:
        raw = RawConfig.read(folder)
        scheme = detect_scheme(raw, folder)
        number_type = checkpoint_dtype(raw) if dtype == "auto" else DTYPES[dtype]
        positions = raw.integer("max_position_embeddings")
        moe = MoeContext.single(number_type, scheme.expert_format)
        main = build_model(raw, BuildContext(positions, moe))
        load_weights(main, folder, scheme)
        sync_input_scales(main, folder)
        return cls(main, load_nextn(main, folder, scheme))

    @torch.inference_mode()
    def drafted(self, replies: Sequence[Reply]) -> list[list[int]]:
        """For each reply what would have been drafted for its tokens from the second on."""
        lengths = [len(reply.ids) for reply in replies]
        x_TH = self.main(*_inputs([reply.ids for reply in replies]), _attend(self.main, lengths))
        ends = torch.tensor(lengths).cumsum(0) - 1
        keep_T = torch.ones(len(x_TH), dtype=torch.bool).index_fill(0, ends, False)
        ids_T, positions_T = _inputs([reply.ids[1:] for reply in replies])
        attention = _attend(self.mtp, [length - 1 for length in lengths])
        x_TH = self.mtp(ids_T, positions_T, x_TH[keep_T], attention)
        rows = x_TH.split([length - 1 for length in lengths])
        return [
            self.mtp.logits(x_TH[reply.drafts.start : reply.drafts.stop]).argmax(-1).tolist()
            for reply, x_TH in zip(replies, rows, strict=True)
        ]


def _inputs(sequences: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    ids = [token for ids in sequences for token in ids]
    positions = [position for ids in sequences for position in range(len(ids))]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)


def _attend(model: CausalLM | NextN, lengths: Sequence[int]) -> TorchAttention:
    """Over an empty cache that is just large enough."""
    spans: list[SequenceSpan] = []
    row, page = 0, 1
    for length in lengths:
        pages = range(page, page - (-length // PAGE))
        spans.append(SequenceSpan(row, length, length, pages))
        row, page = row + length, pages.stop
    cache = PagedCache(model.cache, page - 1, PAGE, model.config.dtype)
    cache.clear(range(page))
    return TorchAttention(cache, [span for span in spans if span.length])


def batches(replies: Sequence[Reply]) -> Iterator[list[Reply]]:
    batch: list[Reply] = []
    for reply in replies:
        if batch and sum(len(other.ids) for other in [*batch, reply]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(reply)
    if batch:
        yield batch


def score(models: Models, replies: Sequence[Reply]) -> Score:
    drafts = right = 0
    for batch in batches(replies):
        for reply, drafted in zip(batch, models.drafted(batch), strict=True):
            drafts += len(drafted)
            right += sum(a == b for a, b in zip(drafted, reply.reply_ids[1:], strict=True))
    return Score(len(replies), sum(len(reply.reply_ids) for reply in replies), drafts, right)


def answer(engine: Engine, prompts: Sequence[str]) -> list[Reply]:
    """Greedily, each prompt as a chat of its own."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": p}]) for p in prompts]
    prompt_ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    greedy = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
    outputs = engine.generate(input_ids=prompt_ids, sampling_params=greedy)
    return [Reply(ids, out["output_ids"]) for ids, out in zip(prompt_ids, outputs, strict=True)]


def row(name: str, found: Score) -> tuple[str, ...]:
    counts = (found.problems, found.tokens, found.drafts, found.right)
    return (name, *map(str, counts), f"{found.share:.3f}", f"{1 + found.share:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.mtp", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="models/house-moe")
    parser.add_argument("--num", type=int, default=50, help="problems of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--out", type=Path, help="unset: bench/results/mtp-MODEL.json")
    parser.add_argument(
        "--again", action="store_true", help="replace a file measured with more problems, too"
    )
    args = parser.parse_args()
    folder = Path(materialise(args.model_path))
    out = args.out or RESULTS / f"mtp-{folder.name}.json"
    spare_larger(
        out, args.num * len(TASKS), lambda old: old["tasks"]["all"]["problems"], args.again
    )
    models = Models.load(folder, args.dtype)
    replies: dict[str, list[Reply]] = {}
    with Engine(model_path=str(folder), dtype=args.dtype, log_level="warning") as engine:
        for task in tqdm(TASKS, desc="tasks"):
            problems = distinct(task, "test", args.seed, args.num)
            replies[task] = answer(engine, [problem.prompt for problem in problems])
    scores = {task: score(models, found) for task, found in replies.items()}
    scores["all"] = Score.total(scores.values())
    print_table(
        ("task", "problems", "tokens", "drafts", "right", "share", "accepted length"),
        [row(task, found) for task, found in scores.items()],
    )
    asked = {key: value for key, value in vars(args).items() if key not in ("out", "again")}
    facts = {"machine": machine(len(os.sched_getaffinity(0))), **asked}
    tables = {task: found.as_json() for task, found in scores.items()}
    write_whole(out, json.dumps(facts | {"tasks": tables}, indent=2).encode() + b"\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
