"""Requests that no good client sends, the same for the same seed: for every route of the table,
JSON that is wrong in its values, its shape or its bytes, and HTTP that is broken below it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moesaic.server.routes import Route

# In texts of all bad requests: no error may repeat it.
MARK = "xyzzy~plugh~0451"
GREEDY = {"temperature": 0, "max_new_tokens": 2}
CHAT = [{"role": "user", "content": f"hello {MARK}"}]
# Bodies that are right, for routes that are known; others get one made from their types.
BODIES: dict[str, Any] = {
    "/generate": {"text": f"hello {MARK}", "sampling_params": GREEDY, "rid": None, "stream": False},
    "/v1/completions": {"model": "m", "prompt": f"hello {MARK}", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {"model": "m", "messages": CHAT, "max_tokens": 2, "temperature": 0},
    "/v1/responses": {"input": CHAT, "max_output_tokens": 2, "temperature": 0},
    "/v1/responses/input_tokens": {"input": f"hello {MARK}"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": f"hello {MARK}", "text": f"hello {MARK}"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/abort_request": {"rid": MARK},
}
SAMPLING = (
    "temperature top_p top_k min_p n stop stop_token_ids logit_bias seed max_new_tokens "
    "min_new_tokens frequency_penalty presence_penalty repetition_penalty ignore_eos regex "
    "json_schema ebnf skip_special_tokens nonsense"
).split()


@dataclass(frozen=True)
class Raw:
    """Bytes in place of a JSON value."""

    data: str


@dataclass(frozen=True)
class Case:
    """`whole`: a request that is complete, so that an answer must come."""

    kind: str
    data: bytes
    whole: bool


def nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    1.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    "",
    " ",
    MARK,
    f"{MARK} " * 200,
    "\x00\x01\x1f\x7f",
    "\u202e\ufeff\ufffe",
    "𝒳" * 50,
    "é",
    [],
    {},
    [[]],
    [{}],
    [None],
    [MARK],
    [1, "x", None],
    {MARK: MARK},
    {"": ""},
    {"1": 1e9},
    {str(k): 1 for k in range(1100)},
    [0] * 5000,
    ["a"] * 100,
    [[1]] * 50,
    [-1],
    [10**9],
    Raw("NaN"),
    Raw("Infinity"),
    Raw("-Infinity"),
    Raw("1e999"),
    Raw("-1e999"),
    Raw("1" + "0" * 400),
    Raw("1" + "0" * 5000),
    Raw("0x10"),
    Raw("01"),
    Raw("+1"),
    Raw("'x'"),
    Raw("undefined"),
    Raw(""),
    Raw('"\\ud800"'),
    Raw('"\\udc00\\ud800"'),
    Raw('"\\u00"'),
    Raw('"\\x41"'),
    Raw('"\n"'),
    Raw('"unterminated'),
    nested(63),
    nested(70),
    nested(2000),
    Raw("[" * 3000),
    Raw('{"a":' * 100 + "1" + "}" * 100),
)


def dump(value: Any) -> str:
    """JSON, with Raw values as they are and keys that may come twice."""
    match value:
        case Raw():
            return value.data
        case dict():
            return "{" + ",".join(f"{json.dumps(k)}:{dump(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def sample_of(route: Route) -> dict[str, Any]:
    """A body that is right, or one whose fields all have the right names."""
    if route.path in BODIES:
        return dict(BODIES[route.path])
    fields = msgspec.structs.fields(route.body) if isinstance(route.body, type) else ()
    return {field.encode_name: "x" for field in fields if field.required}


def names_of(route: Route) -> list[str]:
    fields = msgspec.structs.fields(route.body) if isinstance(route.body, type) else ()
    return [field.encode_name for field in fields] or ["x"]


def bad_body(route: Route, rng: random.Random) -> str:
    """One to three things wrong with it."""
    body = sample_of(route)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        match rng.randrange(6):
            case 0 | 1:
                body[rng.choice(names_of(route))] = rng.choice(VALUES)
            case 2:
                params = dict(GREEDY) | {rng.choice(SAMPLING): rng.choice(VALUES)}
                body["sampling_params"] = rng.choice((params, params, [params], [params] * 3))
            case 3 if body:
                del body[rng.choice(list(body))]
            case 4:
                body[rng.choice((MARK, "x" * 300, "", "temprature", "\x00"))] = rng.choice(VALUES)
            case _:
                body[rng.choice(list(body) or ["x"])] = rng.choice(VALUES)
    text = dump(body)
    if rng.random() < 0.05:
        text = rng.choice(VALUES_ONLY)
    if rng.random() < 0.05:
        text = text[:-1] + "," + text[1:]  # keys that come twice
    return text


VALUES_ONLY = tuple(dump(value) for value in VALUES)


def request_of(method: str, path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def schema_case(routes: Sequence[Route], rng: random.Random) -> Case:
    route = rng.choice([route for route in routes if route.body is not None])
    body = bad_body(route, rng).encode("utf-8", "surrogatepass")
    kind = rng.choice(("application/json", "application/json", "text/plain", "image/png", ""))
    headers = [f"Content-Type: {kind}"] if kind else []
    return Case("schema", request_of(route.method, route.path, body, *headers), True)


def body_bytes_case(routes: Sequence[Route], rng: random.Random) -> Case:
    """JSON whose bytes are wrong, in HTTP that is right."""
    route = rng.choice([route for route in routes if route.body is not None])
    body = dump(sample_of(route)).encode()
    return Case("body bytes", request_of("POST", route.path, scramble(body, rng)), True)


def path_case(routes: Sequence[Route], rng: random.Random) -> Case:
    """Methods, paths and queries that are not there."""
    route = rng.choice(list(routes))
    path = rng.choice(
        (
            route.path,
            route.path + "/",
            route.path + "?" + "a=%00&" * rng.randrange(50),
            route.path + "%2e%2e/",
            "/../../etc/passwd",
            "//" + MARK,
            "/%ff%fe",
            "/" + "a" * rng.randrange(1, 9000),
            "/%",
            "/v1/models/%2e%2e%2f" + MARK,
            "http://other.example" + route.path,
        )
    )
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"))
    if method == route.method == "GET" and path.startswith(route.path):
        method = "DELETE"
    return Case("path", request_of(method, path, b""), method != "HEAD")


def scramble(data: bytes, rng: random.Random) -> bytes:
    """One to four mutations of the bytes."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0:
                found[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del found[at : at + rng.randint(1, 20)]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                found[at:at] = found[at : at + rng.randint(1, 40)]
            case 4:
                found[at:at] = rng.choice(TOKENS)
            case _:
                found = found[: max(at, 1)] if rng.random() < 0.3 else found
    return bytes(found)


TOKENS = (
    b"\r\n",
    b"\n",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xf0\x9f",
    b'"',
    b"\\",
    b"{",
    b"[" * 100,
    b"\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: -1\r\n",
    b"%00",
    b": ",
    b"e999",
    b"NaN",
)


def http_case(routes: Sequence[Route], rng: random.Random) -> Case:
    route = rng.choice([route for route in routes if route.body is not None])
    body = dump(sample_of(route)).encode()
    good = request_of("POST", route.path, body, "Content-Type: application/json")
    data = rng.choice(HTTP)(route.path, body, good, rng)
    return Case("http", data, False)


def _lines(path: str, body: bytes, *headers: str, host: str = "Host: localhost") -> bytes:
    head = [line for line in (f"POST {path} HTTP/1.1", host, *headers) if line]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def chunked(body: bytes, rng: random.Random) -> bytes:
    """The chunks of a body, of a random size, without the last one, which is empty."""
    size = rng.choice((1, 7, 1000))
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    sign = rng.choice((b"", b"", b";a=b", b";" + b"a" * 100))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(piece), sign, piece) for piece in pieces)


Maker = Callable[[str, bytes, bytes, random.Random], bytes]
HTTP: tuple[Maker, ...] = (
    lambda path, body, good, rng: scramble(good, rng),
    lambda path, body, good, rng: scramble(good, rng),
    lambda path, body, good, rng: good[: rng.randrange(len(good))],
    lambda path, body, good, rng: good * rng.randint(2, 5),
    lambda path, body, good, rng: good + scramble(good, rng),
    lambda path, body, good, rng: rng.randbytes(rng.randint(1, 300)),
    lambda path, body, good, rng: b"\r\n" * rng.randint(1, 50) + good,
    lambda path, body, good, rng: good.replace(b"HTTP/1.1", rng.choice(VERSIONS), 1),
    lambda path, body, good, rng: good.replace(b"POST", rng.choice(METHODS), 1),
    lambda path, body, good, rng: _lines(path, body, f"X: {'a' * rng.randint(8000, 40000)}"),
    lambda path, body, good, rng: _lines(path, body, *["X: y"] * rng.randint(100, 9000)),
    lambda path, body, good, rng: _lines(path, body, "Content-Length: 5", "Content-Length: 6"),
    lambda path, body, good, rng: _lines(
        path, body, f"Content-Length: {rng.choice(('-1', '1e3', '9' * 30, '', '0x5', '5, 5'))}"
    ),
    lambda path, body, good, rng: _lines(
        path, body, "Content-Length: 5", "Transfer-Encoding: chunked"
    ),
    lambda path, body, good, rng: _lines(
        path,
        rng.choice((b"zz\r\n", b"5\r\nab", b"ffffffffffffffffff\r\n", b"-1\r\n", b"0\r\nX" * 9)),
        "Transfer-Encoding: chunked",
    ),
    lambda path, body, good, rng: _lines(
        path, chunked(body, rng) + rng.choice(ENDS), "Transfer-Encoding: chunked"
    ),
    lambda path, body, good, rng: _lines(
        path, chunked(body, rng) + b"0\r\n\r\n" + good, "Transfer-Encoding: chunked"
    ),
    lambda path, body, good, rng: _lines(
        path, chunked(body, rng) + b"0\r\n\r\n", f"Transfer-Encoding: {rng.choice(ENCODINGS)}"
    ),
    lambda path, body, good, rng: _lines(
        path, body, f"Content-Length: {len(body)}", host=rng.choice(HOSTS)
    ),
    lambda path, body, good, rng: (
        good.replace(b"Content-Type", b"Connection: upgrade\r\nUpgrade: h2c\r\nX", 1)
        + b"\r\nUpgrade: x" * rng.randrange(2)
        + good
    ),
    lambda path, body, good, rng: _lines(path, body, rng.choice(ODD_LINES)),
    lambda path, body, good, rng: _lines(path, body, "Authorization: Bearer \xff\xfe"),
    lambda path, body, good, rng: _lines(
        path, body, "Connection: Upgrade", "Upgrade: websocket", f"Content-Length: {len(body)}"
    ),
    lambda path, body, good, rng: _lines(
        path, b"", "Expect: 100-continue", f"Content-Length: {rng.choice((10, 10**9))}"
    ),
    lambda path, body, good, rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + good,
    lambda path, body, good, rng: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    lambda path, body, good, rng: b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    lambda path, body, good, rng: b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
)
ENDS = (
    b"0\r\nAuthorization: Bearer x\r\nContent-Length: 3\r\n\r\n",
    b"0\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
    b"0\r\n" + b"X: y\r\n" * 9000 + b"\r\n",
    b"1;" + b"a" * 40_000 + b"\r\nx\r\n0\r\n\r\n",
    b"0" * 40_000 + b"\r\n\r\n",
    b"0;\x00\r\n\r\n",
    b"0\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    b"0\r\n",
)
ENCODINGS = ("gzip, chunked", "chunked, chunked", "identity", "chunked, gzip", "xchunked", "")
HOSTS = (
    "",
    "Host: a\r\nHost: b",
    "Host: a b",
    "Host:",
    "Host: a/b",
    "Host: [",
    "Host: a:b",
    "Host : a",
)
ODD_LINES = ("X: a\r\n b", "X(y): a", "X\x00: a", ": a", "X: a\rb", "X: a\nb", "\xe9: a", " X: a")
VERSIONS = (b"HTTP/0.9", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTP/1.1", b"", b"http/1.1")
METHODS = (b"post", b"FOO", b"P\x00ST", b"PRI", b"SUBSCRIBE", b"\xff", b"")

MAKERS = (
    (schema_case, 60),
    (body_bytes_case, 15),
    (path_case, 10),
    (http_case, 15),
)


def case_of(routes: Sequence[Route], seed: int, number: int) -> Case:
    rng = random.Random(f"{seed}/{number}")
    makers, weights = zip(*MAKERS, strict=True)
    (maker,) = rng.choices(makers, weights)
    case = maker(routes, rng)
    # It would end the good requests, and rightly so.
    return replace(case, data=case.data.replace(b"abort_all", b"abort_one"))
