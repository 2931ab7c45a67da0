"""OpenAI's Responses API, as a translation to the chat and back."""

from __future__ import annotations

from typing import Final

from moesaic.server.responses_api.bodies import InputTokensBody, ResponsesBody
from moesaic.server.responses_api.handlers import count_input_tokens, create_response
from moesaic.server.responses_api.stored import (
    ITEMS_QUERY,
    cancel_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from moesaic.server.routes import USER, Route

PATH: Final = "/v1/responses"
ONE: Final = PATH + "/{response_id}"

ROUTES: Final = (
    Route(
        "POST",
        PATH,
        create_response,
        USER,
        "Answers input items",
        ResponsesBody,
        generates=True,
        example={"input": "Hello", "max_output_tokens": 16},
    ),
    Route(
        "POST",
        f"{PATH}/input_tokens",
        count_input_tokens,
        USER,
        "Counts the tokens of input items",
        InputTokensBody,
        example={"input": "Hello"},
    ),
    Route("GET", ONE, retrieve_response, USER, "A stored response"),
    Route("DELETE", ONE, delete_response, USER, "Deletes a stored response"),
    Route("POST", f"{ONE}/cancel", cancel_response, USER, "Ends a background response"),
    Route(
        "GET",
        f"{ONE}/input_items",
        list_input_items,
        USER,
        "The input of a stored response",
        query=ITEMS_QUERY,
    ),
)
