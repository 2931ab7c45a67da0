"""An answer that another instance begins anew: what the client has already is left out.

Sampling is seeded, so that both instances write the same; where they do not, the answer ends with
an error rather than with two halves that do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from moesaic.server.event_ids import ChoiceMark, RunningDigest, StreamMark, digest_of

DONE: Final = "[DONE]"
# Parts of a choice, or of its `delta`, that are texts.
TEXTS: Final = ("content", "reasoning_content", "text")
# Parts of a choice that are lists of token ids.
TOKEN_IDS: Final = ("token_ids", "response_token_ids")
# Of /generate, whose events have all of both.
WHOLE_TEXT, WHOLE_IDS = "text", "output_ids"


class Diverged(Exception):
    """The second instance writes something else."""


@dataclass(slots=True)
class Progress:
    """What the client has of one choice."""

    texts: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """How many elements of what comes in lists."""
    is_finished: bool = False
    unseen: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Texts that the client has from another router: lengths and digests."""
    digests: dict[str, RunningDigest] = field(default_factory=dict)

    def mark(self, index: int) -> ChoiceMark:
        found = dict(self.unseen)
        for name, text in self.texts.items():
            if text:
                digest = self.digests.setdefault(name, RunningDigest())
                found[name] = len(text), digest.of(text)
        return ChoiceMark(index, found, self.counts, self.is_finished)

    def length(self, name: str) -> int:
        return len(self.texts.get(name, ""))

    def hears(self, name: str, whole: str) -> bool:
        """All of a text so far: whether the client has no more; Diverged if it has another one."""
        if name in self.unseen and not self.catch_up(name, whole):
            return False
        known = self.texts.get(name, "")
        if not (whole.startswith(known) or known.startswith(whole)):
            raise Diverged
        return len(whole) >= len(known)

    def catch_up(self, name: str, heard: str) -> bool:
        """Whether this is the beginning that the client has, and perhaps more; Diverged if it is
        another one."""
        length, digest = self.unseen[name]
        if len(heard) < length:
            return False
        if digest_of(heard[:length]) != digest:
            raise Diverged
        self.texts[name] = heard[:length]
        del self.unseen[name]
        return True


@dataclass(slots=True)
class _Behind:
    """How far an instance that begins anew is."""

    texts: dict[str, int] = field(default_factory=dict)
    heard: dict[str, str] = field(default_factory=dict)
    """The beginnings of texts that this router has not seen."""
    counts: dict[str, int] = field(default_factory=dict)


class StreamReplay:
    """The events of one stream, of whichever instances. `path`: the route."""

    def __init__(self, path: str) -> None:
        self._grows = path == "/generate"
        """Each of its events has all of the text."""
        self._sent: dict[int, Progress] = {}
        self._behind: dict[int, _Behind] | None = None
        self._head: dict[str, Any] = {}
        """The fields that every chunk of a stream has in common."""
        self._has_usage = self.is_done = False

    @classmethod
    def resumed(cls, path: str, mark: StreamMark) -> StreamReplay:
        """Of a client that has this much; the first event is that of an instance that begins."""
        made = cls(path)
        made._head, made._has_usage = dict(mark.head), mark.has_usage
        for one in mark.choices:
            made._sent[one.index] = Progress(
                counts=dict(one.counts), is_finished=one.is_finished, unseen=dict(one.texts)
            )
        made.restart()
        return made

    @property
    def mark(self) -> StreamMark:
        """What the client has."""
        choices = [progress.mark(index) for index, progress in self._sent.items()]
        return StreamMark(self._head, choices, self._has_usage)

    def restart(self) -> None:
        """The next event is the first one of another instance."""
        self._behind = {}

    def pass_on(self, data: str) -> str | None:
        """The event for the client, if there is something new in it."""
        if data == DONE:
            self.is_done = True
            return data
        event = json.loads(data)
        if self._grows:
            return data if self._is_new(event) else None
        head = {name: event[name] for name in ("id", "created") if name in event}
        self._head = self._head or head
        event |= {name: self._head[name] for name in head if name in self._head}
        if not event.get("choices"):  # the usage at the end
            is_known, self._has_usage = self._has_usage, "usage" in event
            return None if is_known else json.dumps(event, ensure_ascii=False)
        event["choices"] = [*self._new_choices(event["choices"])]
        return json.dumps(event, ensure_ascii=False) if event["choices"] else None

    def _is_new(self, event: dict[str, Any]) -> bool:
        progress = self._sent.setdefault(event.get("index", 0), Progress())
        ids = _as_text(event.get(WHOLE_IDS, ()))
        texts = {WHOLE_TEXT: event.get(WHOLE_TEXT, ""), WHOLE_IDS: ids}
        heard = [progress.hears(name, text) for name, text in texts.items()]
        reason = (event.get("meta_info") or {}).get("finish_reason")
        is_end = reason is not None
        if is_end and not all(heard) and not _is_aborted(reason):
            raise Diverged
        has_more = WHOLE_IDS not in progress.unseen and len(ids) > progress.length(WHOLE_IDS)
        if not has_more and not (is_end and not progress.is_finished):
            return False
        for name, text in texts.items():
            if name not in progress.unseen and len(text) > progress.length(name):
                progress.texts[name] = text
        progress.is_finished = is_end
        return True

    def _new_choices(self, choices: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            index = choice.get("index", 0)
            begun = index in self._sent
            progress = self._sent.setdefault(index, Progress())
            holder = choice.get("delta") if "delta" in choice else choice
            assert isinstance(holder, dict)
            is_new = self._cut(choice, holder, index, progress)
            reason = choice.get("finish_reason")
            ends = reason is not None
            if ends and not _is_aborted(reason) and self._is_short(index, progress):
                raise Diverged
            if is_new or (ends and not progress.is_finished) or not begun:
                progress.is_finished |= ends
                yield choice

    def _is_short(self, index: int, progress: Progress) -> bool:
        """Whether the instance that began anew has written less than the client has."""
        if self._behind is None:
            return False
        heard = self._behind[index].texts
        sent = progress.texts.items()
        return bool(progress.unseen) or any(heard.get(name, 0) < len(text) for name, text in sent)

    def _cut(
        self, choice: dict[str, Any], holder: dict[str, Any], index: int, progress: Progress
    ) -> bool:
        """Takes out what the client has; whether something is left."""
        behind = None if self._behind is None else self._behind.setdefault(index, _Behind())
        is_new = behind is None
        for name in TEXTS:
            if isinstance(text := holder.get(name), str):
                holder[name] = new = _rest(text, name, progress, behind)
                is_new |= bool(new)
        calls = holder.pop("tool_calls", None) or ()
        if left := [call for call in calls if _cut_call(call, progress, behind)]:
            holder["tool_calls"], is_new = left, True
        for name in TOKEN_IDS:
            if isinstance(ids := choice.get(name), list):
                new = _rest(_as_text(ids), name, progress, behind)
                choice[name] = [*map(ord, new)]
                is_new |= bool(new)
        if isinstance(scores := choice.get("logprobs"), dict):
            lists = [values for values in scores.values() if isinstance(values, list)]
            is_new |= _cut_lists("logprobs", lists, progress, behind)
        return is_new


def _cut_call(call: dict[str, Any], progress: Progress, behind: _Behind | None) -> bool:
    """A call is a name, and arguments that come in pieces; each instance gives it an id of its own,
    of which the client gets the first."""
    number, function = call["index"], call["function"]
    if "name" in function:
        function["name"] = _rest(function["name"], f"name {number}", progress, behind)
        if not function["name"]:
            del function["name"]
            call.pop("id", None)
            call.pop("type", None)
    arguments = f"arguments {number}"
    function["arguments"] = _rest(function["arguments"], arguments, progress, behind)
    return behind is None or bool(function["arguments"]) or "name" in function


def _as_text(ids: Iterable[int]) -> str:
    """Token ids are compared and cut as texts are: a character of each."""
    return "".join(map(chr, ids))


def _cut_lists(
    name: str, lists: list[list[Any]], progress: Progress, behind: _Behind | None
) -> bool:
    """Takes out the elements that the client has; whether some are left."""
    length, sent = max(map(len, lists), default=0), progress.counts.get(name, 0)
    start = sent if behind is None else behind.counts.get(name, 0)
    known = max(0, sent - start)
    for values in lists:
        del values[:known]
    if behind is not None:
        behind.counts[name] = start + length
    progress.counts[name] = max(sent, start + length)
    return length > known


def _is_aborted(reason: Any) -> bool:
    """Whether that may be why an answer ends: OpenAI's word for it is length."""
    return (reason.get("type") if isinstance(reason, dict) else reason) in ("abort", "length")


def _rest(text: str, name: str, progress: Progress, behind: _Behind | None) -> str:
    """The part of a text behind what the client has."""
    sent = progress.texts.get(name, "")
    if behind is None:
        progress.texts[name] = sent + text
        return text
    if name in progress.unseen:
        heard = behind.heard[name] = behind.heard.get(name, "") + text
        if not progress.catch_up(name, heard):
            return ""
        behind.texts[name], sent = len(heard), progress.texts[name]
        progress.texts[name] = heard
        return heard[len(sent) :]
    start = behind.texts.get(name, 0)
    behind.texts[name] = start + len(text)
    if start >= len(sent):
        progress.texts[name] = sent + text
        return text
    known = sent[start : start + len(text)]
    if not text.startswith(known):
        raise Diverged
    new = text[len(known) :]
    progress.texts[name] = sent + new
    return new
