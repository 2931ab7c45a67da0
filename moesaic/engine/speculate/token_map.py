"""Reads --speculative-token-map: the tokens that a draft model may propose, which are fewer than
those that the target knows, so that its logits cost less (FR-Spec)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from moesaic.balance.files import read_content
from moesaic.config import ServerArgs

FLAG = "--speculative-token-map"


def hot_tokens(args: ServerArgs, vocab_size: int) -> list[int] | None:
    """Ascending, each once; None if all may be proposed."""
    if args.speculative_token_map is None:
        return None
    path = Path(args.speculative_token_map)
    try:
        found = read_content(path)
    except ValueError as error:
        raise ValueError(
            f"{FLAG} {error}: give a file of torch.save or JSON with a list of token ids"
        ) from None
    if isinstance(found, Tensor):
        found = found.tolist()
    if not isinstance(found, list) or not found or not all(type(one) is int for one in found):
        raise ValueError(f"{FLAG} {path} has no list of token ids: give a file with one")
    outside = [token for token in found if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"{FLAG} {path} has token {outside[0]}, and the target's vocab_size is {vocab_size}: "
            "give a file that was made for its tokenizer"
        )
    tokens, branches = sorted(set(found)), args.speculative_eagle_topk or 1
    if len(tokens) < branches:
        raise ValueError(
            f"{FLAG} {path} has {len(tokens)} tokens, fewer than --speculative-eagle-topk "
            f"{branches}: give more, or fewer branches"
        )
    return tokens
