"""Input items of the Responses API as messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final
from uuid import uuid4

from moesaic.core.redact import shown
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import CallBody, CallFunction, MessageBody
from moesaic.server.responses_api.bodies import InputItem, ItemPart

TEXT_PARTS: Final = frozenset(("input_text", "output_text", "text", "reasoning_text"))
ID_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def new_item_id(kind: str) -> str:
    return f"{ID_PREFIXES[kind]}_{uuid4().hex}"


class Messages(list[MessageBody]):
    """`thoughts`: the reasoning of a message by its index, joined at the end: joining a text with
    each of many items would take quadratic time."""

    def __init__(self) -> None:
        super().__init__()
        self.thoughts: dict[int, list[str]] = {}


def messages_of(given: str | list[InputItem]) -> list[MessageBody]:
    if isinstance(given, str):
        return [MessageBody(role="user", content=given)]
    found = Messages()
    for item in given:
        _READERS.get(_type_of(item), _refuse)(found, item)
    for index, texts in found.thoughts.items():
        found[index].reasoning_content = "".join(texts)
    return found


def listed_items(given: str | list[InputItem]) -> list[dict[str, Any]]:
    """The items as /v1/responses/{id}/input_items lists them, each with an id."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    return [_listed(item) for item in given]


def _listed(item: InputItem) -> dict[str, Any]:
    kind = _type_of(item)
    found: dict[str, Any] = {
        "id": item.id or new_item_id(kind),
        "type": kind,
        "status": "completed",
    }
    match kind:
        case "message":
            found |= {"role": item.role, "content": _listed_parts(item)}
        case "function_call":
            found |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments or ""}
        case "function_call_output":
            output = _text(item.output)
            found |= {"call_id": item.call_id, "output": output}
        case "reasoning":
            texts = [{"type": "reasoning_text", "text": _text(item.content)}]
            found |= {"summary": [], "content": texts}
    return found


def _listed_parts(item: InputItem) -> list[dict[str, Any]]:
    kind = "output_text" if item.role == "assistant" else "input_text"
    extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **extra} for text in _texts(item.content)]


def _message(found: Messages, item: InputItem) -> None:
    text = _text(item.content)
    if item.role is None:
        raise Refusal(400, "a message in input needs a role", "input")
    if item.role == "user" and item.content is None:
        raise Refusal(400, "a user's message in input needs content", "input")
    if item.role == "assistant":
        _assistant(found, lambda turn: turn.content is None).content = text
    else:
        found.append(MessageBody(role=item.role, content=text))


def _call(found: Messages, item: InputItem) -> None:
    if item.call_id is None or item.name is None:
        raise Refusal(400, "a function_call in input needs call_id and name", "input")
    turn = _assistant(found)
    call = CallBody(CallFunction(item.name, item.arguments or ""), item.call_id)
    turn.tool_calls = turn.tool_calls or []
    turn.tool_calls.append(call)


def _call_output(found: Messages, item: InputItem) -> None:
    if item.call_id is None or item.output is None:
        raise Refusal(400, "a function_call_output in input needs call_id and output", "input")
    found.append(MessageBody(role="tool", content=_text(item.output), tool_call_id=item.call_id))


def _reasoning(found: Messages, item: InputItem) -> None:
    """Reasoning that is encrypted or omitted has no text here."""
    text = _text(item.content) or _text(item.summary, ("summary_text",))
    if text:
        _assistant(found, lambda turn: turn.content is None)
        found.thoughts.setdefault(len(found) - 1, []).append(text)


def _refuse(_: Messages, item: InputItem) -> None:
    if item.type is None and item.id is None:
        raise Refusal(400, "an item in input needs a type or a role", "input")
    kinds = ", ".join(_READERS)
    text = f"input items of type {shown(_type_of(item))} are not supported: give {kinds}"
    raise Refusal(400, text, "input")


_READERS: Final[dict[str, Callable[[Messages, InputItem], None]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _assistant(
    found: Messages, has_room: Callable[[MessageBody], bool] = lambda _: True
) -> MessageBody:
    """The assistant's turn at the end, or a new one: adjacent items of one are one message."""
    if not found or found[-1].role != "assistant" or not has_room(found[-1]):
        found.append(MessageBody(role="assistant"))
    return found[-1]


def _type_of(item: InputItem) -> str:
    return item.type or ("message" if item.role is not None else "item_reference")


def _text(content: str | list[ItemPart] | None, also: Iterable[str] = ()) -> str:
    return "\n".join(_texts(content, also))


def _texts(content: str | list[ItemPart] | None, also: Iterable[str] = ()) -> list[str]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    return [_part_text(part, also) for part in content]


def _part_text(part: ItemPart, also: Iterable[str]) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in TEXT_PARTS and part.type not in also:
        text = f"content of type {shown(part.type)} is not supported: this server reads text"
        raise Refusal(400, text, "input")
    return part.text or ""
