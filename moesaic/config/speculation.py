"""Resolves the flags of speculative decoding, or says what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

from moesaic.config.args import ServerArgs
from moesaic.config.devices import device_of
from moesaic.config.flags import show, specs
from moesaic.core.draft_tree import MOST_ROWS
from moesaic.core.speculation import ALGORITHMS, AcceptThresholds, Speculation

COUNTS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
BREADTH = 10
ONE_TOKEN = "--speculative-num-draft-tokens is 1, the newest token alone: give at least 2, or "
# Choices of backends and formats are taken alone, as in the guide's commands.
NEED_ALGORITHM = (
    *COUNTS,
    "speculative_draft_model_path",
    "speculative_token_map",
    "disable_speculative_adaptive",
    *THRESHOLDS,
    "speculative_ngram_min_bfs_breadth",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_capacity",
)
BACKENDS = ("speculative_moe_runner_backend", "speculative_moe_a2a_backend")


def speculation_of(args: ServerArgs) -> Speculation | None:
    """`args` are resolved. None: without drafts."""
    if args.speculative_algorithm is None:
        return None
    steps, tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    assert steps is not None and tokens is not None, "the flags are not resolved"
    name, topk = args.speculative_algorithm, args.speculative_eagle_topk or 1
    breadth = topk
    if name == "NGRAM":
        breadth = args.speculative_ngram_max_bfs_breadth or 1
    single, acc = (getattr(args, field) for field in THRESHOLDS)
    return Speculation(
        name,
        steps,
        tokens,
        args.speculative_draft_model_path,
        topk,
        AcceptThresholds.of(single, acc),
        breadth,
    )


def speculation_defaults(args: ServerArgs) -> Iterator[tuple[str, object, str]]:
    """The values that flags get, and why."""
    name = args.speculative_algorithm
    if name is None:
        return
    if args.speculative_attention_mode != "prefill":
        yield "speculative_attention_mode", "prefill", "one kernel serves both"
    default, why = ALGORITHMS[name], f"the default of {name}"
    if args.speculative_num_steps is None:
        tokens = args.speculative_num_draft_tokens or default.num_draft_tokens
        steps = tokens - 1 if default.on_ranks else default.num_steps
        yield "speculative_num_steps", steps, why
        yield "speculative_num_draft_tokens", tokens, why
        yield "speculative_eagle_topk", 1, why
    elif default.on_ranks and (args.speculative_eagle_topk or 1) == 1:
        tokens = args.speculative_num_steps + 1
        yield "speculative_num_draft_tokens", tokens, "a chain: one more than its steps"
        yield "speculative_eagle_topk", 1, why
    if not default.on_ranks and args.speculative_ngram_max_bfs_breadth is None:
        breadth = "speculative_ngram_max_bfs_breadth"
        if (args.speculative_num_draft_tokens or default.num_draft_tokens) > MOST_ROWS:
            yield breadth, 1, f"a tree has at most {MOST_ROWS} tokens"
        elif device_of(args) == "cuda" and args.speculative_ngram_min_bfs_breadth == 1:
            yield breadth, 1, "steps with prompts beside trees have no graph on CUDA"
        else:
            yield breadth, max(BREADTH, args.speculative_ngram_min_bfs_breadth), why


def speculation_problems(args: ServerArgs) -> Iterator[str]:
    """What is wrong with these arguments in every version, the first cause first."""
    name = args.speculative_algorithm
    if name is None:
        yield from _needs_algorithm(args)
    elif (known := ALGORITHMS.get(name)) is not None:
        shown = f"--speculative-algorithm {name}"
        if known.needs_model and args.speculative_draft_model_path is None:
            yield f"{shown} needs --speculative-draft-model-path DIR: the model that makes drafts"
        if not known.takes_model and args.speculative_draft_model_path is not None:
            yield (
                f"{_shown(args, 'speculative_draft_model_path')}: {shown} has no draft model: "
                "leave it out"
            )
        if known.no_token_map and args.speculative_token_map is not None:
            yield (
                f"{_shown(args, 'speculative_token_map')}: {shown} {known.no_token_map}: leave it "
                "out"
            )
        if not known.on_ranks:
            yield from _without_models(args, shown)
        if known.on_ranks:
            yield from _draft_models(args, shown)
        for field in THRESHOLDS:
            if getattr(args, field) < 1 and args.enable_deterministic_inference:
                yield (
                    f"{_shown(args, field)} with --enable-deterministic-inference: answers would "
                    "depend on the drafts: give 1"
                )


def _needs_algorithm(args: ServerArgs) -> Iterator[str]:
    for field in NEED_ALGORITHM:
        if getattr(args, field) != specs(ServerArgs)[field].default:
            yield f"{_shown(args, field)} needs --speculative-algorithm"


def _without_models(args: ServerArgs, shown: str) -> Iterator[str]:
    for field in BACKENDS:
        if getattr(args, field) is not None:
            yield f"{_shown(args, field)}: {shown} has no draft model: leave it out"
    if args.speculative_num_steps is not None and args.speculative_num_draft_tokens is None:
        yield (
            f"{_shown(args, 'speculative_num_steps')}: {shown} takes none: give "
            f"--speculative-num-draft-tokens {args.speculative_num_steps + 1}"
        )
    if (args.speculative_eagle_topk or 1) > 1:
        yield (
            f"{_shown(args, 'speculative_eagle_topk')}: the branches of {shown} are those of "
            f"--speculative-ngram-max-bfs-breadth {args.speculative_eagle_topk}: give that"
        )
    if args.speculative_num_draft_tokens == 1:
        yield ONE_TOKEN + f"leave {shown} out"
    least, most = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
    if most is None:
        return
    if least > most:
        yield (
            f"--speculative-ngram-min-bfs-breadth {least} is more than "
            f"--speculative-ngram-max-bfs-breadth {most}: give at most {most}"
        )
    tokens = args.speculative_num_draft_tokens or 0
    if tokens > MOST_ROWS and most > 1:
        yield (
            f"--speculative-ngram-max-bfs-breadth {most} with --speculative-num-draft-tokens "
            f"{tokens}: a tree has at most {MOST_ROWS} tokens: give that, or 1 of the other"
        )


def _draft_models(args: ServerArgs, shown: str) -> Iterator[str]:
    steps, tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    topk = args.speculative_eagle_topk or 1
    if tokens == 1:
        yield ONE_TOKEN + f"leave {shown} out"
    if topk > 1:
        yield from _tree_problems(topk, steps, tokens)
    elif steps is not None and tokens is not None and tokens != steps + 1:
        yield (
            f"--speculative-num-draft-tokens {tokens} with --speculative-num-steps {steps}: a "
            f"chain of {steps} drafts and the newest token are {steps + 1}: give that, or leave "
            "one of the two out"
        )
    if args.pp_size > 1:
        yield (
            f"{shown} with --pp-size {args.pp_size}: drafts continue the last stage's output, and "
            "the first stage waits for them in every step: give --pp-size 1"
        )


def _tree_problems(topk: int, steps: int | None, tokens: int | None) -> Iterator[str]:
    shown = f"--speculative-eagle-topk {topk}"
    if steps is None or tokens is None:
        yield (
            f"{shown} needs --speculative-num-steps and --speculative-num-draft-tokens: how deep "
            "its trees are, and how many of their tokens a step verifies"
        )
        return
    nodes = topk + (steps - 1) * topk**2
    if tokens > nodes + 1:
        yield (
            f"--speculative-num-draft-tokens {tokens} with {shown} and --speculative-num-steps "
            f"{steps}: only {nodes} drafts are found, and the newest token makes them {nodes + 1}: "
            "give at most that"
        )
    if topk >= tokens:
        yield (
            f"{shown} with --speculative-num-draft-tokens {tokens}: more branches than drafts: "
            f"give a topk of at most {tokens - 1}"
        )
    rows = tokens + 1 + topk * (steps - 1)
    if rows > MOST_ROWS:
        yield (
            f"--speculative-num-draft-tokens {tokens} with {shown} and --speculative-num-steps "
            f"{steps}: the verified tokens, and those of branches behind them, are {rows}, and at "
            f"most {MOST_ROWS} may be in a tree: give fewer of one"
        )


def _shown(args: ServerArgs, field: str) -> str:
    return show(specs(ServerArgs)[field], getattr(args, field))
