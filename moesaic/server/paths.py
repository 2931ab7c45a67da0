"""Paths that no route has: a trailing slash, and answers that say what is served instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.core.redact import quoted
from moesaic.server.errors import Refusal

LONGEST_PATH: Final = 200
# How alike a path and one that is served must be for a hint.
CLOSE: Final = 0.8
# Routes that people do not call themselves: the files of the page.
UNLISTED: Final = "/page/"
VERSION: Final = "/v1"
TEXT_ONLY: Final = "the model reads and writes text only"
NO_HEAD: Final = (
    "the model generates text and has no head for scores: compare the logprobs of the answers "
    "instead, with logprobs and echo of /v1/completions, or return_logprob of /generate"
)
FIXED_WEIGHTS: Final = (
    "weights do not change while the server runs: start it again with the new model's folder"
)
AT_START: Final = "this is set by flags when the server starts"
SEPARATED: Final = "/v1/chat/completions separates calls and reasoning from the answer by itself"
NO_STORE: Final = "the server keeps no files: send their text in the prompt"
CHAT_INSTEAD: Final = "keep the messages yourself and send them all to /v1/chat/completions"

# What clients of other servers ask for, by the paths without /v1 (* is any text; paths below one
# are meant too), and why it is not there or what to do instead.
NOT_OFFERED: Final = tuple(
    (tuple(paths.split()), reason)
    for paths, reason in (
        (
            "/embeddings /embed /encode /pooling",
            "the model generates text and gives no embeddings: run a server for an embedding model "
            "beside this one",
        ),
        ("/rerank /v2/rerank /score /classify /decisions /systemone", NO_HEAD),
        ("/moderations", "no moderation model is served: ask the model in a chat"),
        ("/images /audio /videos /realtime", TEXT_ONLY),
        ("/files /uploads /containers /vector_stores", NO_STORE),
        ("/fine_tuning /fine-tunes", FIXED_WEIGHTS),
        (
            "/batches /messages/batches",
            "send the requests at once: the server runs them in batches by itself",
        ),
        ("/assistants /threads /conversations", CHAT_INSTEAD),
        ("/edits", "ask for the change in a message to /v1/chat/completions"),
        ("/engines", "GET /v1/models has the model that is served"),
        (
            "/api",
            "this is Ollama's API: choose the OpenAI API in your client, with the address of this "
            "server and /v1",
        ),
        ("/invocations /vertex_generate", "send POST /v1/chat/completions or /generate"),
        (
            "/update_weight* /*_weights_update_group /*_weight_update /get_weights_by_name "
            "/weights_checker /*_remote_instance* /remote_instance*",
            FIXED_WEIGHTS,
        ),
        (
            "/*load_lora_adapter*",
            "no adapters are served: merge the adapter into the weights and serve the new folder",
        ),
        (
            "/open_session /close_session",
            "there are no sessions: send the whole prompt, of which the prefix cache computes only "
            "what is new",
        ),
        (
            "/release_memory_occupation /resume_memory_occupation /sleep /wake_up /is_sleeping",
            "memory is held while the server runs: stop it (SIGTERM) and start it again",
        ),
        (
            "/pause_generation /continue_generation /slow_down",
            "generation is not paused: end requests with POST /abort_request",
        ),
        ("/set_internal_state /configure_logging /set_trace_level", AT_START),
        ("/freeze_gc /dumper", "this is for developers of SGLang"),
        ("/hicache /get_hicache_*", "the prefix cache is only in the memory of the ranks"),
        ("/*_external_corpus /list_external_corpora", "no drafts are made from a corpus"),
        ("/pd_role_switch", "every rank serves prompts and decodes"),
        ("/parse_function_call /separate_reasoning", SEPARATED),
        ("/ready", "send GET /health"),
        ("/reset_prefix_cache", "send POST /flush_cache"),
        ("/load", "send GET /get_load or GET /v1/loads"),
        ("/docs /redoc", "GET /openapi.json describes the routes"),
    )
)


class TrailingSlash:
    """Routes a path with slashes at its end like the path without them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def unknown_path(path: str, served: Iterable[str]) -> Refusal:
    """The 404 for a path that no route has; `served`: the paths of all routes."""
    shown = quoted(path, LONGEST_PATH)
    if reason := not_offered(path):
        text = f"{shown} is not offered: {reason}; GET /openapi.json describes what is served"
        return Refusal(404, text)
    known = sorted({name for name in served if not name.startswith(UNLISTED)})
    close = get_close_matches(path[:LONGEST_PATH], known, n=1, cutoff=CLOSE)
    hint = f"did you mean {close[0]}? " if close else ""
    return Refusal(404, f"there is no {shown} here; {hint}served: {', '.join(known)}")


def not_offered(path: str) -> str:
    """Why a path that clients of other servers know is not served; empty for other paths."""
    path = path[:LONGEST_PATH].removeprefix(VERSION)
    for patterns, reason in NOT_OFFERED:
        if any(fnmatchcase(path, p) or path.startswith(f"{p}/") for p in patterns):
            return reason
    return ""


def wrong_method(allowed: Iterable[str]) -> Refusal:
    """The 405 for a path that has other methods."""
    found = ", ".join(sorted(allowed))
    return Refusal(405, f"this path has no such method: send {found}", headers={"Allow": found})
