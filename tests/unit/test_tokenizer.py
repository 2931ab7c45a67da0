"""The tokenizer against transformers, on folders made here."""

import json
import unicodedata

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from moesaic.engine.text.tokenizer import ChatTemplateError, Tokenizer

TEXTS = [
    "",
    "Hello world",
    "  two  spaces\tand\n\nlines ",
    "naïve café — 你好 🙂👩‍👩‍👧",
    "x<|im_end|>y</s> <s>z <extra> <plain>",
    "def f(x):\n    return x+1",
    "\x00\x7f\u00ad\ufffd",
]
CORPUS = ["Hello world, hello there", "def f(x):\n    return x + 1", "two spaces", "naïve café"]

MIXTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{% if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{- message.content | trim }}{% endgeneration %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>' }}{% endif %}
{%- endif %}"""
DEEPSEEK = """{% set ns = namespace(system='', first=true) %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}
{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' %}
{%- set c = m['content'] %}
{%- if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + c + eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
GPT_OSS = """{%- macro header(role) %}{{ '<|start|>' + role + '<|message|>' }}{% endmacro %}
{{- header('system') + 'Current date: ' + strftime_now('%Y-%m-%d') + '\\n' }}
{{- 'Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.thinking is defined %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
    {%- endif %}
    {{- header(message.role) + message.content + '<|end|>' }}
    {%- if loop.index == 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
CHAT = [
    {"role": "user", "content": " What is <b>2+2</b>? "},
    {"role": "assistant", "content": "<think>hm</think>4 — «четыре»"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & ü"}}]


def byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback():
    words = ["▁", "▁Hello", "▁world", "▁two", "Hello", *"abcdefghijklmnopqrstuvwxyz"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: number for number, name in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace():
    backend = byte_level()
    vocab = {name.replace("Ġ", "▁"): number for name, number in backend.get_vocab().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def write(folder, backend, settings=None, **files):
    backend.save(str(folder / "tokenizer.json"))
    contents = {"tokenizer_config": NAMED if settings is None else settings, **files}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def entry(content, **flags):
    base = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **base, **flags}


OLD_STYLE = {
    "bos_token": entry("<s>", __type="AddedToken"),
    "eos_token": entry("</s>", __type="AddedToken"),
    "extra_special_tokens": ["<extra>"],
}
CONFIGS = {
    "plain": (NAMED, {}),
    "dicts": (OLD_STYLE, {}),
    "map": ({}, {"special_tokens_map": {"bos_token": entry("<s>"), "eos_token": "</s>"}}),
    "additional": ({**NAMED, "additional_special_tokens": ["<extra>", "<|im_end|>"]}, {}),
    "new words": ({**NAMED, "pad_token": "<pad>", "image_token": "<img>"}, {}),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(tmp_path, kind, config):
    settings, files = CONFIGS[config]
    write(tmp_path, KINDS[kind](), settings, **files)
    ours, theirs = (
        Tokenizer.from_folder(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        bare = ours.encode(text, add_special_tokens=False)
        assert bare == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens["eos_token"] == theirs.eos_token
    assert ours.eos_ids == {theirs.eos_token_id}


def unigram():
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*CORPUS, "각각 é"], trainer)
    return backend


def word_piece():
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, metaspace, unigram, word_piece])
def test_many_at_once_give_what_one_gives(tmp_path, kind):
    """`encode` and `decode` call the backend's batch functions, which release Python's lock."""
    backend = kind()
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    for text in [*TEXTS, "".join(TEXTS) * 300]:
        for special in (False, True):
            ids = tokenizer.encode(text, special)
            assert ids == tokenizer.backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.decode(ids, special) == tokenizer.backend.decode(ids, special)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, unigram])
def test_no_token_stands_for_more_than_the_longest(tmp_path, kind):
    tokenizer = Tokenizer.from_folder(write(tmp_path, kind()))
    longest = max(tokenizer.backend.get_vocab(), key=len)
    decomposed = unicodedata.normalize("NFD", "각é") * 50
    for text in [*TEXTS[1:], longest * 50, decomposed, "<|im_end|>" * 50]:
        assert len(text) <= tokenizer.longest_token * len(tokenizer.encode(text, False))


def test_added_tokens_decoder(tmp_path):
    backend = byte_level()
    size = backend.get_vocab_size()
    listed = {
        str(size): entry("<plain>", normalized=True, lstrip=True),
        str(size + 1): entry("<extra>", special=True, rstrip=True),
        "1": entry("</s>", special=True),
    }
    write(tmp_path, backend, {**NAMED, "added_tokens_decoder": listed})
    ours, theirs = (
        Tokenizer.from_folder(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    text = "a <plain> b <extra> c</s>"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert {size, size + 1, 1} < set(ours.encode(text))
    assert ours.id_to_token(size) == "<plain>"
    assert (
        ours.decode(ours.encode(text))
        == "a<plain> b c"
        == theirs.decode(ours.encode(text), skip_special_tokens=True)
    )


@pytest.mark.parametrize(
    ("flags", "bos", "eos"),
    [
        ({}, None, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, None, True),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_bos_token": False, "add_eos_token": False}, False, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_explicit_bos_and_eos_overrule_the_post_processor(tmp_path, kind, flags, bos, eos):
    write(tmp_path, KINDS[kind](), {**NAMED, **flags})
    ours = Tokenizer.from_folder(tmp_path)
    bare = ours.encode("Hello", add_special_tokens=False)
    bos = kind == "byte_fallback" if bos is None else bos
    first, last = (ours.backend.token_to_id(NAMED[name]) for name in ("bos_token", "eos_token"))
    assert ours.encode("Hello") == [first] * bos + bare + [last] * eos
    if "add_bos_token" in flags:
        file = str(tmp_path / "tokenizer.json")
        theirs = PreTrainedTokenizerFast(tokenizer_file=file, **NAMED, **flags)
        assert ours.encode("Hello") == theirs("Hello")["input_ids"]


def test_flags_without_the_token_are_ignored(tmp_path):
    write(tmp_path, byte_level(), {"add_bos_token": True, "bos_token": None})
    assert Tokenizer.from_folder(tmp_path).encode("") == []


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    write(tmp_path, backend)
    assert Tokenizer.from_folder(tmp_path).encode("abcd") == byte_level().encode("abcd").ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {1}),
        ({"generation_config": {"eos_token_id": [3, 2]}}, {1, 2, 3}),
        ({"config": {"eos_token_id": 7}}, {1, 7}),
        ({"config": {"text_config": {"eos_token_id": [8]}}}, {1, 8}),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 0}}, {0, 1}),
    ],
    ids=str,
)
def test_eos_ids(tmp_path, files, expected):
    assert Tokenizer.from_folder(write(tmp_path, byte_level(), **files)).eos_ids == expected


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        ("byte_fallback", "▁Hello", " Hello"),
        ("byte_fallback", "Hello", "Hello"),
        ("byte_fallback", "<0xE2>", "\ufffd"),
        ("byte_fallback", "</s>", "</s>"),
        ("metaspace", "▁", " "),
        ("byte_level", "Ġ", " "),
        ("byte_level", "Ð", "\ufffd"),
        ("byte_level", "<|im_end|>", "<|im_end|>"),
    ],
)
def test_token_text(tmp_path, kind, token, text):
    ours = Tokenizer.from_folder(write(tmp_path, KINDS[kind]()))
    assert ours.token_text(ours.backend.token_to_id(token)) == text


@pytest.mark.parametrize(
    ("template", "kwargs"),
    [
        (MIXTRAL, {}),
        (QWEN, {}),
        (QWEN, {"tools": TOOLS, "add_generation_prompt": False}),
        (QWEN, {"enable_thinking": False}),
        (DEEPSEEK, {}),
        (GPT_OSS, {}),
        (GPT_OSS, {"reasoning_effort": "high", "add_generation_prompt": False}),
    ],
    ids=["mixtral", "qwen", "qwen tools", "qwen quiet", "deepseek", "gpt-oss", "gpt-oss high"],
)
def test_chat_is_that_of_transformers(tmp_path, template, kwargs):
    write(tmp_path, byte_level(), {**NAMED, "chat_template": template})
    ours, theirs = (
        Tokenizer.from_folder(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    reasoned = {"role": "assistant", "content": "yes", "reasoning_content": "because"}
    for chat in (CHAT, CHAT[:1], CHAT + [reasoned]):
        want = theirs.apply_chat_template(
            chat, tokenize=False, **{"add_generation_prompt": True, **kwargs}
        )
        assert ours.apply_chat_template(chat, **kwargs) == want
    assert CHAT[0]["content"].strip() in want


def test_reasoning_reaches_the_template_under_its_names(tmp_path):
    write(tmp_path, byte_level(), {"chat_template": GPT_OSS})
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert "analysis<|message|>2+2<|end|>" in Tokenizer.from_folder(tmp_path).apply_chat_template(
        [message]
    )
    assert "thinking" not in message


def test_where_templates_come_from(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write(tmp_path, byte_level(), {"chat_template": named})
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.apply_chat_template(CHAT) == "D"
    assert ours.apply_chat_template(CHAT, tools=TOOLS) == "T"
    assert Tokenizer.from_folder(tmp_path, "tool_use").apply_chat_template(CHAT) == "T"
    assert Tokenizer.from_folder(tmp_path, "{{ 1 + 1 }}").apply_chat_template(CHAT) == "2"

    (tmp_path / "chat_template.jinja").write_text("file {{ messages | length }}")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(CHAT) == "file 3"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert Tokenizer.from_folder(tmp_path, "rag").apply_chat_template(CHAT) == "rag"
    file = str(tmp_path / "additional_chat_templates" / "rag.jinja")
    assert Tokenizer.from_folder(tmp_path, file).apply_chat_template(CHAT) == "rag"
    with pytest.raises(ValueError, match=r"chat_template='nothing' .* \['default', 'rag'\]"):
        Tokenizer.from_folder(tmp_path, "nothing")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template: give one"),
        ("{% if %}", "not valid Jinja"),
        ("{{ raise_exception('only two turns') }}", "does not accept these messages: only two"),
        ("{{ messages[0].nothing.more }}", "does not accept these messages: .*nothing"),
        ("{{ 1 / 0 }}", "does not accept these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ([{"name": "rag", "template": "x"}], r"\['rag'\], but no default"),
    ],
    ids=str,
)
def test_template_errors(tmp_path, template, words):
    write(tmp_path, byte_level(), {"chat_template": template})
    with pytest.raises(ChatTemplateError, match=words):
        Tokenizer.from_folder(tmp_path).apply_chat_template(CHAT)


def test_folder_errors(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer.json: .*skip_tokenizer_init"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_disagreeing_ids_are_reported(tmp_path, caplog):
    listed = {"9999": entry("<odd>", special=True)}
    write(tmp_path, byte_level(), {"added_tokens_decoder": listed})
    Tokenizer.from_folder(tmp_path)
    assert "'<odd>' the id 9999" in caplog.text


def test_tokens_of_the_file_keep_their_flags(tmp_path):
    backend = byte_level()
    backend.add_tokens([AddedToken("<plain>", lstrip=True, normalized=False)])
    write(tmp_path, backend)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.decode(ours.encode("a <plain>")) == "a<plain>"
