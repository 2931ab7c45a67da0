"""Flags of `moesaic generate` that are not the engine's: prompts, sampling, output."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from moesaic.config.flags import Flag
from moesaic.evals.args import TEMPERATURE, TOP_P

NOT_SAMPLING = ("prompt", "chat", "json")


@dataclass(frozen=True)
class GenerateArgs:
    """Unset sampling flags are not passed on: SamplingParams has the defaults."""

    GROUP: ClassVar[str] = "Prompts and sampling"

    prompt: Annotated[
        tuple[str, ...], Flag("A prompt; may be given several times.", repeat=True)
    ] = ()
    chat: Annotated[bool, Flag("Wrap prompts in the model's chat template.")] = False
    max_new_tokens: Annotated[int | None, Flag("Most tokens of an answer.", at_least=0)] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_p: Annotated[float | None, TOP_P] = None
    top_k: Annotated[
        int | None, Flag("Keep this many tokens; -1: all.", at_least=1, also=(-1,))
    ] = None
    min_p: Annotated[
        float | None,
        Flag("Drop tokens below this share of the likeliest one.", at_least=0, at_most=1),
    ] = None
    seed: Annotated[int | None, Flag("Seed of the answers.", at_least=0)] = None
    stop: Annotated[
        tuple[str, ...] | None, Flag("End at this text; may be given several times.", repeat=True)
    ] = None
    n: Annotated[int | None, Flag("Answers to each prompt.", at_least=1)] = None
    ignore_eos: Annotated[bool | None, Flag("Continue after the end-of-text token.")] = None
    json: Annotated[bool, Flag("Print one JSON object for each answer.")] = False

    def sampling(self) -> dict[str, Any]:
        """The given sampling parameters."""
        values = {name: value for name, value in vars(self).items() if name not in NOT_SAMPLING}
        return {name: value for name, value in values.items() if value is not None}
