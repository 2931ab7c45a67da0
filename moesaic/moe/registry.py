"""The backends and their declared capabilities, from which one matrix is computed.

A backend is a contract (formats, payloads, weights) with a provider for each device. The matrix
refuses combinations that cannot work, suggests the nearest that can, and resolves `auto`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import Any, Protocol, TypeVar

from moesaic.config.flags import nearest
from moesaic.moe.formats import DISPATCH_FORMATS
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat

UNQUANTIZED = ("bf16", "fp16", "fp32")
FP8_WEIGHTS = ("fp8_block", "fp8_channel", "fp8_tensor")
MODES = ("normal", "low_latency")
PHASES = ("prefill", "decode")


class BufferSpec(Hashable, Protocol):
    def nbytes(self, size: int) -> int:
        """The bytes of one of `size` ranks."""


Buffers = Callable[[Any], Sequence[BufferSpec]]


@dataclass(frozen=True)
class Provider:
    """What implements an a2a backend on one device."""

    make: Callable[..., Any]
    """(DispatchConfig, CommContext) to the dispatcher of one layer."""
    buffers: Buffers = lambda config: ()
    """The buffers that a dispatcher with this DispatchConfig allocates, or shares with others."""
    formats: Mapping[str, str] | None = None
    """The dispatch format of each mode, where it is not the contract's."""
    local: bool = False
    """Whether a single rank sends nothing and needs no buffers."""

    @classmethod
    def choosing(
        cls,
        choose: Callable[[Any], Any],
        formats: Mapping[str, str] | None = None,
        local: bool = False,
    ) -> Provider:
        """`choose` gives the class of dispatcher for a DispatchConfig, which knows its buffers."""
        return cls(
            lambda config, comm: choose(config)(config, comm),
            lambda config: choose(config).buffers(config),
            formats,
            local,
        )

    def __call__(self, config: Any, comm: Any) -> Any:
        return self.make(config, comm)


@dataclass(frozen=True)
class A2aBackend:
    """A contract, and what implements it on each device."""

    name: str
    summary: str
    formats: Mapping[str, str]
    """The dispatch format of each mode."""
    payloads: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    """The kinds of steps that it serves."""
    providers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By device: a `Provider`, or just what makes a dispatcher."""
    modes_in_rounds: tuple[str, ...] = ()
    """Modes that send long sequences in rounds."""
    takes_replicated: bool = False
    """Whether ranks that all hold the same tokens need not send them."""

    def provider(self, device: str) -> Provider:
        found = self.providers[device]
        return found if isinstance(found, Provider) else Provider(found)

    def formats_for(self, device: str) -> Mapping[str, str]:
        """On a device without a provider those of the contract."""
        own = self.provider(device).formats if device in self.providers else None
        return self.formats if own is None else own


@dataclass(frozen=True)
class RunnerBackend:
    name: str
    summary: str
    layouts: Mapping[str, str]
    """The layout in which it computes each dispatch format."""
    weights: tuple[str, ...]
    payloads: tuple[str, ...]
    preferred: tuple[str, ...] = ()
    """Weights for which `auto` tries it first."""
    providers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


A2A_REGISTRY: dict[str, A2aBackend] = {}
RUNNER_REGISTRY: dict[str, RunnerBackend] = {}
Backend = TypeVar("Backend", A2aBackend, RunnerBackend)


def provider_name(make: Callable[..., Any]) -> str:
    """What a provider calls itself; else `native`, or the module it comes from."""
    make = make.make if isinstance(make, Provider) else make
    ours = make.__module__.startswith("moesaic.")
    name: str = getattr(make, "provider", "native" if ours else make.__module__)
    return name


def _register(registry: dict[str, Backend], kind: str, backend: Backend) -> Backend:
    if not backend.name.isidentifier() or backend.name == "auto":
        raise ValueError(f"{kind} backend {backend.name!r}: give a name like my_backend")
    if backend.name in registry:
        raise ValueError(f"{kind} backend {backend.name!r} is registered twice")
    registry[backend.name] = backend
    return backend


def register_a2a(backend: A2aBackend) -> A2aBackend:
    declared = {
        "mode": (backend.formats, MODES),
        "format": (backend.formats.values(), DISPATCH_FORMATS),
        "payload": (backend.payloads, PAYLOAD_FORMATS),
        "phase": (backend.phases, PHASES),
    }
    for kind, (names, known) in declared.items():
        unknown = sorted(set(names) - set(known))
        if unknown or not names:
            raise ValueError(
                f"a2a backend {backend.name!r}: {kind} {unknown or 'missing'}: known are "
                f"{tuple(known)}"
            )
    for device in backend.providers:
        formats = backend.formats_for(device)
        if set(formats) != set(backend.formats) or set(formats.values()) - set(DISPATCH_FORMATS):
            raise ValueError(
                f"a2a backend {backend.name!r}: formats {dict(formats)} on {device}: give one of "
                f"{tuple(DISPATCH_FORMATS)} for each of its modes, {tuple(backend.formats)}"
            )
    return _register(A2A_REGISTRY, "a2a", backend)


def register_runner(backend: RunnerBackend) -> RunnerBackend:
    unknown = set(backend.weights) - set(WEIGHT_FORMATS)
    unknown |= set(backend.payloads) - set(PAYLOAD_FORMATS)
    if unknown:
        raise ValueError(
            f"runner backend {backend.name!r}: unknown {sorted(unknown)}; weights are "
            f"{tuple(WEIGHT_FORMATS)}, payloads are {tuple(PAYLOAD_FORMATS)}"
        )
    return _register(RUNNER_REGISTRY, "runner", backend)


@dataclass(frozen=True)
class MoeProblem:
    """One combination. `dtype` is that of the activations; a size of 0 is not checked."""

    a2a: str = "none"
    mode: str = "auto"
    runner: str = "auto"
    payload: str = "auto"
    weights: WeightFormat = WEIGHT_FORMATS["bf16"]
    dtype: str = "bf16"
    ep: int = 1
    tp: int = 1
    phases: tuple[str, ...] = PHASES
    device: str = "cpu"
    hidden_size: int = 0
    intermediate_size: int = 0
    experts: int = 0
    redundant: int = 0

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep


@dataclass(frozen=True, slots=True)
class Support:
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedChoice:
    """A problem without `auto`, and the reason of each choice."""

    problem: MoeProblem
    reasons: tuple[str, ...]


FLAGS = {
    "a2a": "--moe-a2a-backend",
    "mode": "--deepep-mode",
    "runner": "--moe-runner-backend",
    "payload": "--deepep-dispatch-output-dtype",
    "ep": "--ep-size",
    "redundant": "--ep-num-redundant-experts",
}


def modes_of(problem: MoeProblem) -> tuple[str, ...]:
    """The modes in use: the requested one, or all of the backend."""
    return tuple(A2A_REGISTRY[problem.a2a].formats) if problem.mode == "auto" else (problem.mode,)


def formats_of(problem: MoeProblem) -> tuple[str, ...]:
    formats = A2A_REGISTRY[problem.a2a].formats_for(problem.device)
    return tuple(dict.fromkeys(formats[mode] for mode in modes_of(problem)))


def payload_of(problem: MoeProblem) -> tuple[str, str]:
    """The payload and the reason: the weights' activation format, if both backends take it."""
    if problem.payload != "auto":
        return problem.payload, "as asked"
    wanted = problem.weights.activation
    if wanted is None:
        return problem.dtype, f"{problem.weights.name} weights take activations as they are"
    a2a = A2A_REGISTRY[problem.a2a]
    if problem.tp == 1 and problem.device in a2a.providers and a2a.provider(problem.device).local:
        return problem.dtype, f"nothing travels: the runner makes {wanted} of it"
    for backend in (a2a, RUNNER_REGISTRY.get(problem.runner)):
        if backend is not None and wanted not in backend.payloads:
            return problem.dtype, f"{backend.name} does not take {wanted}"
    if problem.hidden_size:
        try:
            PAYLOAD_FORMATS[wanted].check(problem.hidden_size)
        except ValueError as error:
            return problem.dtype, str(error)
    return wanted, f"{problem.weights.name} weights are multiplied with {wanted} activations"


def _names(problem: MoeProblem) -> Iterator[str]:
    for kind, name, names in (
        ("--moe-a2a-backend", problem.a2a, [*A2A_REGISTRY]),
        ("--moe-runner-backend", problem.runner, ["auto", *RUNNER_REGISTRY]),
    ):
        if name not in names:
            hint = nearest(name, names)
            yield f"{kind} {name!r} is not known: choose one of {', '.join(names)}{hint}"
    if problem.payload not in ("auto", *PAYLOAD_FORMATS):
        known = ", ".join(PAYLOAD_FORMATS)
        yield f"payload {problem.payload!r} is not known: choose one of {known}"


def _sizes(problem: MoeProblem) -> Iterator[str]:
    if problem.ep > problem.tp or problem.tp % problem.ep:
        yield f"ep {problem.ep} does not divide tp {problem.tp}"
        return
    slots = problem.experts + problem.redundant
    if problem.experts and slots % problem.ep:
        yield f"{slots} expert slots cannot be laid evenly over ep {problem.ep}"
    if problem.intermediate_size % problem.moe_tp:
        yield (
            f"an intermediate size of {problem.intermediate_size} cannot be cut in "
            f"{problem.moe_tp} (tp {problem.tp} / ep {problem.ep})"
        )
    elif problem.intermediate_size:
        yield from _weights_fit(problem, problem.intermediate_size // problem.moe_tp)


def _weights_fit(problem: MoeProblem, cut: int) -> Iterator[str]:
    weights = problem.weights
    try:
        weights.check(cut, problem.hidden_size or cut)
        weights.check(problem.hidden_size or cut, cut)
        if problem.moe_tp > 1:
            weights.check_cut(cut)
    except ValueError as error:
        yield f"{weights.name} weights with ep {problem.ep} of tp {problem.tp}: {error}"


def _a2a(problem: MoeProblem) -> Iterator[str]:
    backend = A2A_REGISTRY[problem.a2a]
    yield from _provided(backend, problem)
    if problem.mode != "auto" and problem.mode not in backend.formats:
        yield f"{backend.name} has no {problem.mode} mode, only {', '.join(backend.formats)}"
    for phase in problem.phases:
        if phase not in backend.phases:
            yield f"{backend.name} serves {' and '.join(backend.phases)} steps only, not {phase}"


def _provided(backend: A2aBackend | RunnerBackend, problem: MoeProblem) -> Iterator[str]:
    if problem.device not in backend.providers:
        known = ", ".join(backend.providers) or "nothing"
        yield f"{backend.name} has no provider for {problem.device}, only for {known}"


def _runner(problem: MoeProblem) -> Iterator[str]:
    backend = RUNNER_REGISTRY[problem.runner]
    weights = problem.weights.name
    yield from _provided(backend, problem)
    if weights not in backend.weights:
        yield (
            f"{backend.name} does not compute with {weights} weights, only with "
            f"{', '.join(backend.weights)}"
        )
    if weights in UNQUANTIZED and weights != problem.dtype:
        yield f"{weights} weights cannot be multiplied with {problem.dtype} activations"
    yield from _takes(backend, problem)
    for format in formats_of(problem):
        if format not in backend.layouts:
            yield (
                f"{backend.name} does not take the format {format!r} of {problem.a2a}, only "
                f"{', '.join(backend.layouts)}"
            )


def _payload(problem: MoeProblem) -> Iterator[str]:
    yield from _takes(A2A_REGISTRY[problem.a2a], problem)
    payload, _ = payload_of(problem)
    wanted = problem.weights.activation
    if payload not in UNQUANTIZED and wanted not in (None, payload):
        yield (
            f"payload {payload} would be rounded again: {problem.weights.name} weights are "
            f"multiplied with {wanted} activations"
        )
    if payload not in UNQUANTIZED and problem.hidden_size:
        try:
            PAYLOAD_FORMATS[payload].check(problem.hidden_size)
        except ValueError as error:
            yield str(error)


def _takes(backend: A2aBackend | RunnerBackend, problem: MoeProblem) -> Iterator[str]:
    payload, _ = payload_of(problem)
    if payload not in backend.payloads:
        yield f"{backend.name} does not take payload {payload}, only {', '.join(backend.payloads)}"


RULES_OF_ALL = (_names, _sizes, _a2a, _payload)  # for any runner
RULES = (*RULES_OF_ALL, _runner)


def supports(problem: MoeProblem) -> Support:
    """Whether a combination works; `auto` works if anything does."""
    rules = RULES if problem.runner != "auto" else RULES_OF_ALL
    for rule in rules:
        for reason in rule(problem):
            return Support(False, reason)
    if problem.runner != "auto":
        return Support(True)
    tried = [supports(replace(problem, runner=name)) for name in _order(problem.weights)]
    reasons = "; ".join(dict.fromkeys(support.reason for support in tried))
    return next((s for s in tried if s.ok), Support(False, f"no runner fits: {reasons}"))


def _order(weights: WeightFormat) -> list[str]:
    """All runners; those that prefer these weights come first."""
    return sorted(
        RUNNER_REGISTRY, key=lambda name: weights.name not in RUNNER_REGISTRY[name].preferred
    )


def resolve(problem: MoeProblem) -> ResolvedChoice:
    """Resolves `auto`; ValueError with the reason and the nearest combination that works."""
    unknown = next(_names(problem), None)
    if unknown is not None:
        raise ValueError(unknown)
    support = supports(problem)
    if not support.ok:
        raise ValueError(f"{support.reason}; {_advice(problem)}")
    reasons = []
    if problem.runner == "auto":
        runner = next(r for r in _order(problem.weights) if supports(replace(problem, runner=r)).ok)
        preferred = problem.weights.name in RUNNER_REGISTRY[runner].preferred
        why = "preferred for" if preferred else "the first that computes with"
        reasons.append(f"runner {runner}: {why} {problem.weights.name} weights")
        problem = replace(problem, runner=runner)
    if problem.payload == "auto":
        payload, why = payload_of(problem)
        reasons.append(f"payload {payload}: {why}")
        problem = replace(problem, payload=payload)
    modes = modes_of(problem)
    if problem.mode == "auto" and len(modes) == 1:
        reasons.append(f"mode {modes[0]}: the only one of {problem.a2a}")
        problem = replace(problem, mode=modes[0])
    return ResolvedChoice(problem, tuple(reasons))


def _advice(problem: MoeProblem) -> str:
    nearest = suggest(problem)
    if nearest is None:
        return "no choice of backends would help"
    changes = ", ".join(
        f"{flag} {getattr(nearest, name)}"
        for name, flag in FLAGS.items()
        if getattr(nearest, name) != getattr(problem, name)
    )
    return f"use {changes}"


def suggest(problem: MoeProblem) -> MoeProblem | None:
    """The combination that works with the fewest changed flags, the least important first."""
    splits = [n for n in range(problem.tp, 0, -1) if problem.tp % n == 0]
    options: dict[str, list[Any]] = {
        "payload": ["auto"],
        "runner": ["auto"],
        "mode": ["auto"],
        "a2a": list(A2A_REGISTRY),
        "ep": splits,
        "redundant": sorted({-problem.experts % n for n in splits}) if problem.experts else [],
    }
    for count in range(1, len(options) + 1):
        for names in combinations(options, count):
            for values in product(*(options[name] for name in names)):
                candidate = replace(problem, **dict(zip(names, values, strict=True)))
                if candidate != problem and supports(candidate).ok:
                    return candidate
    return None


def combinations_of(**fixed: Any) -> Iterator[tuple[MoeProblem, Support]]:
    """All combinations of backends, modes, payloads and weights, and whether each works."""
    axes = product(A2A_REGISTRY, MODES, RUNNER_REGISTRY, PAYLOAD_FORMATS, WEIGHT_FORMATS.values())
    make = partial(MoeProblem, **fixed)
    for a2a, mode, runner, payload, weights in axes:
        problem = make(a2a=a2a, mode=mode, runner=runner, payload=payload, weights=weights)
        yield problem, supports(problem)
