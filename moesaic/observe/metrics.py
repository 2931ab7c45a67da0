"""The table of all metrics: the source of /metrics, docs/metrics.md and the Grafana dashboard."""

from __future__ import annotations

from functools import partial
from typing import Final

from moesaic.observe import metric_series as series
from moesaic.observe.metric_types import (
    GROUP,
    LAG_BOUNDS,
    Metric,
    MetricKind,
    MetricSource,
    Series,
    SglangName,
)
from moesaic.observe.requests import GAP_BOUNDS, LATENCY_BOUNDS

INFO_LABELS: Final = tuple(
    "version model mesh a2a_backend mode runner_backend emulated_link".split()
)


def _also(names: str) -> tuple[SglangName, ...]:
    return tuple(SglangName(name) for name in names.split())


_counter = partial(Metric, kind=MetricKind.COUNTER)
_gauge = partial(Metric, kind=MetricKind.GAUGE)
_histogram = partial(Metric, kind=MetricKind.HISTOGRAM)

METRICS: Final[tuple[Metric, ...]] = (
    _counter(
        "requests_total",
        "Requests that ended, by reason: stop, length, abort (by the client) or error.",
        series.labelled("finish_reason", MetricSource.REQUESTS, lambda s: s.requests.ended),
        sglang=(
            SglangName("num_requests_total"),
            SglangName("num_aborted_requests_total", only="abort"),
        ),
    ),
    _gauge("requests_open", "Requests that have not ended.", series.requests(lambda r: r.open)),
    _counter(
        "prompt_tokens_total",
        "Prompt tokens, including cached ones; counted at the first output token.",
        series.requests(lambda r: r.prompt_tokens),
        sglang=_also("prompt_tokens_total"),
    ),
    _counter(
        "cached_tokens_total",
        "Prompt tokens found in the prefix cache.",
        series.requests(lambda r: r.cached_tokens),
        sglang=(SglangName("cached_tokens_total", labels={"cache_source": "device"}),),
    ),
    _counter(
        "generation_tokens_total",
        "Tokens sent to clients.",
        series.requests(lambda r: r.generated_tokens),
        sglang=_also("generation_tokens_total"),
    ),
    _histogram(
        "time_to_first_token_seconds",
        "Time from a request's arrival to its first token.",
        series.requests(lambda r: r.time_to_first_token, LATENCY_BOUNDS),
        sglang=_also("time_to_first_token_seconds"),
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Time between two tokens of an answer.",
        series.requests(lambda r: r.inter_token, GAP_BOUNDS),
        sglang=_also("inter_token_latency_seconds"),
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "Time from arrival to the last token, for requests that were not aborted.",
        series.requests(lambda r: r.end_to_end, LATENCY_BOUNDS),
        sglang=_also("e2e_request_latency_seconds"),
    ),
    _histogram(
        "queue_time_seconds",
        "Time from a request's arrival to its first step.",
        series.requests(lambda r: r.queue, LATENCY_BOUNDS),
        sglang=_also("queue_time_seconds"),
    ),
    _gauge(
        "cache_hit_ratio",
        "Share of prompt tokens found in the prefix cache since the start.",
        series.requests(lambda r: series.hit_ratio(r.cached_tokens, r.prompt_tokens)),
        sglang=_also("cache_hit_rate"),
    ),
    _gauge(
        "requests_running",
        "Requests in the batch.",
        series.groups(lambda g: g.running),
        sglang=_also("num_running_reqs"),
    ),
    _gauge(
        "requests_waiting",
        "Requests in the scheduler's queue.",
        series.groups(lambda g: g.waiting),
        sglang=_also("num_queue_reqs"),
    ),
    _gauge(
        "kv_cache_usage_ratio",
        "Share of the KV cache's pages that running requests hold.",
        series.groups(series.kv_usage, hidden=()),
        sglang=_also("token_usage full_token_usage"),
    ),
    _gauge(
        "kv_cache_used_tokens",
        "Tokens that fit in the pages that running requests hold.",
        series.groups(lambda g: g.pages_used * g.page_size),
        sglang=_also("num_used_tokens kv_used_tokens"),
    ),
    _gauge(
        "kv_cache_tokens",
        "Tokens that fit in the KV cache.",
        series.groups(lambda g: g.pages_total * g.page_size),
        sglang=_also("max_total_num_tokens"),
    ),
    _gauge(
        "generation_throughput",
        "Tokens generated per second between the last two readings.",
        Series(MetricSource.SCHEDULERS, series.throughputs, (GROUP,), hidden=(GROUP,)),
        sglang=_also("gen_throughput"),
    ),
    _counter(
        "preemptions_total",
        "Requests that lost their pages to others; they resume from the tokens already emitted.",
        series.groups(lambda g: g.retractions),
        sglang=_also("num_retracted_requests_total"),
    ),
    _counter(
        "prompts_arrived_total",
        "Prompts that other instances have computed (--disaggregation-mode decode).",
        series.groups(lambda g: g.prompts_arrived),
    ),
    _counter(
        "prompts_recomputed_total",
        "Prompts that did not arrive from another instance, and are computed here.",
        series.groups(lambda g: g.prompts_recomputed),
        sglang=_also("num_transfer_failed_reqs_total"),
    ),
    _gauge(
        "decode_batch_size",
        "Mean of tokens generated per step between the last two readings.",
        Series(MetricSource.SCHEDULERS, lambda s: [((), s.batch)]),
    ),
    _counter(
        "computed_tokens_total",
        "Tokens computed in steps: prompt tokens (prefill) and output tokens (decode).",
        series.phases("prompt_tokens", "generated_tokens"),
        sglang=(
            SglangName("realtime_tokens_total", "prefill", {"mode": "prefill_compute"}),
            SglangName("realtime_tokens_total", "decode", {"mode": "decode"}),
        ),
    ),
    _counter(
        "steps_total",
        "Forward steps; a step with any prompt tokens is a prefill.",
        series.phases("prefill_steps", "decode_steps"),
    ),
    _counter(
        "overlap_steps_total",
        "The same steps by their schedule: off, sbo (shared experts beside transfers) or tbo (two "
        "micro-batches).",
        Series(
            MetricSource.SCHEDULERS, series.schedules, (GROUP, "phase", "schedule"), hidden=(GROUP,)
        ),
    ),
    _counter(
        "forward_seconds_total",
        "Seconds spent in steps.",
        series.phases("prefill_seconds", "decode_seconds"),
    ),
    _counter(
        "failed_steps_total",
        "Steps that raised an error; their requests ended.",
        series.groups(lambda g: g.failed_steps),
    ),
    _counter(
        "spec_verified_total",
        "Drafts that steps have verified, each of one request (speculative decoding).",
        series.drafting(lambda g: g.verified),
        sglang=_also("spec_verify_calls_total"),
    ),
    _counter(
        "spec_drafted_tokens_total",
        "Tokens of verified drafts, by their position from 1 on.",
        series.positions(lambda g: g.drafted_tokens),
    ),
    _counter(
        "spec_accepted_tokens_total",
        "Those that were accepted.",
        series.positions(lambda g: g.accepted_tokens),
    ),
    _gauge(
        "spec_accept_length",
        "Tokens that a verified draft gives, with the one that its step samples, since the start.",
        series.drafting(lambda g: 1 + sum(g.accepted_tokens) / max(1, g.verified)),
        sglang=_also("spec_accept_length"),
    ),
    _gauge(
        "spec_accept_rate",
        "Share of drafted tokens that were accepted, since the start.",
        series.drafting(lambda g: series.hit_ratio(sum(g.accepted_tokens), sum(g.drafted_tokens))),
        sglang=_also("spec_accept_rate"),
    ),
    _gauge(
        "spec_num_drafts",
        "The most tokens of a request's draft in the next step; 0 while drafts do not pay.",
        series.drafting(lambda g: g.num_drafts),
    ),
    _counter(
        "rank_steps_total", "Steps that a rank took part in.", series.ranks(lambda r: r.steps)
    ),
    _counter(
        "rank_step_seconds_total",
        "Seconds that a rank spent in steps: compute and wait together.",
        series.ranks(lambda r: r.compute_seconds + r.wait_seconds),
    ),
    _counter(
        "rank_compute_seconds_total",
        "Seconds that a rank spent computing.",
        series.ranks(lambda r: r.compute_seconds),
    ),
    _counter(
        "rank_wait_seconds_total",
        "Seconds that a rank waited for others; the rank that waits least is the slowest.",
        series.ranks(lambda r: r.wait_seconds),
    ),
    _counter(
        "rank_runner_seconds_total",
        "Seconds of a rank's computing that its experts took.",
        series.ranks(lambda r: r.runner_seconds),
    ),
    _gauge(
        "rank_state",
        "1 for the current state of a rank.",
        Series(MetricSource.RANKS, series.states, ("rank", "place", "state"), hidden=("place",)),
    ),
    _gauge(
        "rank_state_seconds",
        "Seconds that a rank has been in its current state.",
        series.ranks(lambda r: r.state_age),
    ),
    _gauge(
        "ranks_live",
        "Ranks that take part in steps (--elastic-ep-backend).",
        series.membership(lambda m: len(m.live)),
    ),
    _counter(
        "rank_losses_total",
        "Ranks that were lost while they served; each is started again.",
        series.membership(lambda m: m.lost),
    ),
    _counter(
        "rank_returns_total",
        "Ranks that were started again and have joined the others.",
        series.membership(lambda m: m.returned),
    ),
    _counter(
        "http_losses_total",
        "HTTP processes that were lost; each is started again (--elastic-ep-backend).",
        series.losses(lambda lost: lost.http),
    ),
    _counter(
        "supervisor_losses_total",
        "Supervisors that were lost; each is started again, and all ranks with it.",
        series.losses(lambda lost: lost.supervisor),
    ),
    _counter(
        "node_takeovers_total",
        "Nodes that were lost while they led the service, whose place this one has taken.",
        series.losses(lambda lost: lost.node),
    ),
    _counter(
        "service_loss_seconds_total",
        "Seconds from losses of the HTTP process, supervisor or leading node until requests go on.",
        series.losses(lambda lost: lost.seconds),
    ),
    _counter(
        "membership_change_seconds_total",
        "Seconds from losses and returns until all live ranks had adopted them.",
        series.membership(lambda m: m.seconds),
    ),
    _counter(
        "requests_moved_total",
        "Requests that another serving group continued, as theirs had lost a rank.",
        series.membership(lambda m: m.moved_requests),
    ),
    _counter(
        "experts_reread_bytes_total",
        "Bytes of experts that live ranks read again, as no live rank had them.",
        series.membership(lambda m: m.nbytes),
    ),
    _counter(
        "a2a_bytes_total",
        "Bytes that a rank's dispatcher moved to other ranks' experts and back.",
        series.traffic("bytes"),
    ),
    _counter("a2a_rows_total", "Rows that a rank's dispatcher moved.", series.traffic("rows")),
    _counter(
        "a2a_seconds_total",
        "Seconds that a rank was blocked in dispatch or combine.",
        series.traffic("seconds"),
    ),
    _counter(
        "expert_tokens_total",
        "Tokens that the experts of a rank computed.",
        Series(MetricSource.RANKS, series.expert_tokens, ("layer", "rank"), hidden=("rank",)),
    ),
    _gauge(
        "ep_balancedness",
        "Tokens of a layer's experts since the start: mean over ranks / maximum over ranks.",
        Series(MetricSource.RANKS, series.balancedness, ("layer",)),
    ),
    _counter(
        "eplb_rebalances_total",
        "Rebalances (--enable-eplb) that have moved experts.",
        series.ranks(lambda r: r.moves.rebalances),
    ),
    _counter(
        "eplb_aborted_total",
        "Rebalances that were dropped: the layers that had not moved kept their placement.",
        series.ranks(lambda r: r.moves.aborted),
    ),
    _counter(
        "eplb_moved_bytes_total",
        "Bytes of experts that a rank has received from others.",
        series.ranks(lambda r: r.moves.bytes),
    ),
    _counter(
        "eplb_move_seconds_total",
        "Seconds from the beginning of rebalances to their end, while steps go on.",
        series.ranks(lambda r: r.moves.seconds),
    ),
    _gauge(
        "ep_pass_balancedness",
        "Rows of the ranks in a forward pass: mean / maximum, averaged over the passes of the last "
        "report and all layers; with --expert-balancedness-report-mode prometheus or both.",
        Series(MetricSource.RANKS, series.pass_balance),
    ),
    _gauge(
        "ep_layer_pass_balancedness",
        "The same for each layer.",
        Series(MetricSource.RANKS, series.layer_balance, ("layer",)),
    ),
    _gauge(
        "requests_queued",
        "Requests in the server's queue, before the engine.",
        series.server(lambda s: s.server.queued),
        sglang=_also("num_queue_reqs"),
    ),
    _counter(
        "http_requests_total",
        "Responses by route (other: no known route) and status.",
        Series(MetricSource.SERVER, series.http, ("route", "status")),
    ),
    _counter(
        "http_refused_total",
        "Responses with status 429: the queue was full.",
        series.server(series.refused),
    ),
    _histogram(
        "event_loop_lag_seconds",
        "Lag of the event loop, measured every 20 ms.",
        Series(MetricSource.SERVER, lambda s: [((), s.server.loop_lag)], buckets=LAG_BOUNDS),
    ),
    _gauge(
        "event_loop_lag_max_seconds",
        "Largest lag of the event loop in the last minute.",
        series.server(lambda s: s.server.loop_lag_max),
    ),
    _gauge(
        "startup_seconds",
        "Seconds that the start took, by stage: tokenizer, model (weights and ranks).",
        series.labelled("stage", MetricSource.SERVER, lambda s: s.server.startup),
        sglang=(
            SglangName("startup_time_seconds", "tokenizer", {"phase": "tokenizer_e2e"}),
            SglangName("startup_time_seconds", "model", {"phase": "scheduler_e2e"}),
        ),
    ),
    _gauge(
        "stats_age_seconds",
        "Age of the values of schedulers and ranks; they are read at most once a second unless "
        "requests have ended.",
        series.server(lambda s: s.engine_age),
    ),
    _gauge(
        "overlap_hidden_ratio",
        "Part of a step's communication that the schedule of --overlap auto hides, measured at "
        "start, by the kind of step, the most tokens of a rank and the schedule.",
        Series(MetricSource.SERVER, series.hidden_ratios, ("kind", "tokens", "schedule")),
    ),
    _gauge(
        "info",
        "Always 1; the labels hold the configuration that was resolved at start.",
        Series(
            MetricSource.SERVER,
            lambda s: [(tuple(s.server.info[label] for label in INFO_LABELS), 1)],
            INFO_LABELS,
        ),
    ),
)
