"""Flags of `moesaic generate` that are not the engine's: prompts, sampling, output."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.config.flags import flag
from moesaic.evals.args import TEMPERATURE, TOP_P

NOT_SAMPLING = ("prompt", "chat", "json")


@dataclass(frozen=True)
class GenerateArgs:
    """Unset sampling flags are not passed on: SamplingParams has the defaults."""

    GROUP: ClassVar[str] = "Prompts and sampling"

    prompt: tuple[str, ...] = flag((), "A prompt; may be given several times.", repeat=True)
    chat: bool = flag(False, "Wrap prompts in the model's chat template.")
    max_new_tokens: int | None = flag(None, "Most tokens of an answer.", at_least=0)
    temperature: float | None = flag(None, TEMPERATURE, at_least=0)
    top_p: float | None = flag(None, TOP_P, above=0, at_most=1)
    top_k: int | None = flag(None, "Keep this many tokens; -1: all.", at_least=1, also=(-1,))
    min_p: float | None = flag(
        None, "Drop tokens below this share of the likeliest one.", at_least=0, at_most=1
    )
    seed: int | None = flag(None, "Seed of the answers.", at_least=0)
    stop: tuple[str, ...] | None = flag(
        None, "End at this text; may be given several times.", repeat=True
    )
    n: int | None = flag(None, "Answers to each prompt.", at_least=1)
    ignore_eos: bool | None = flag(None, "Continue after the end-of-text token.")
    json: bool = flag(False, "Print one JSON object for each answer.")

    def sampling(self) -> dict[str, Any]:
        """The given sampling parameters."""
        values = {name: value for name, value in vars(self).items() if name not in NOT_SAMPLING}
        return {name: value for name, value in values.items() if value is not None}
