"""Models in the Hub's cache, in the layout that huggingface_hub documents."""

import logging
from pathlib import Path

import pytest

from moesaic.config.args import ServerArgs
from moesaic.engine.engine import Engine
from moesaic.models.locate import model_folder, tokenizer_folder, with_local_folders

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tmp_path / "models--Qwen--Qwen3-30B-A3B"
    for name, commit in COMMITS.items():
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / name).write_text(commit)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(hub: Path, revision: str | None = None, name: str = "Qwen/Qwen3-30B-A3B") -> str:
    return model_folder(ServerArgs(model_path=name, revision=revision, download_dir=str(hub)))


@pytest.mark.parametrize(
    ("revision", "commit"),
    [(None, "a" * 40), ("main", "a" * 40), ("v1", "b" * 40), ("b" * 40, "b" * 40)],
)
def test_revisions(hub: Path, revision: str | None, commit: str):
    assert found(hub, revision) == f"{hub}/models--Qwen--Qwen3-30B-A3B/snapshots/{commit}"


def test_what_is_not_there_is_not_downloaded(hub: Path):
    with pytest.raises(ValueError) as caught:
        found(hub, "v2")
    assert str(caught.value) == (
        f"Qwen/Qwen3-30B-A3B is neither a folder nor in {hub} at v2, and nothing is downloaded: "
        "run hf download Qwen/Qwen3-30B-A3B --revision v2, or give a folder"
    )
    with pytest.raises(ValueError, match="run hf download openai/gpt-oss-20b, or give a folder"):
        found(hub, name="openai/gpt-oss-20b")


def test_a_folder_has_no_revisions(hub: Path):
    (hub / "Qwen" / "Qwen3-30B-A3B").mkdir(parents=True)
    assert found(hub) == "Qwen/Qwen3-30B-A3B"
    with pytest.raises(ValueError, match="--revision v1 chooses a version in the Hub's cache"):
        found(hub, "v1")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_where_the_cache_is(hub: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    root = hub if variable == "HF_HUB_CACHE" else hub.rename(hub.parent / "hub")
    monkeypatch.setenv(variable, str(root if variable == "HF_HUB_CACHE" else root.parent))
    args = ServerArgs(model_path="Qwen/Qwen3-30B-A3B")
    folder = model_folder(args)
    assert folder == f"{root}/models--Qwen--Qwen3-30B-A3B/snapshots/{'a' * 40}"
    assert tokenizer_folder(args, folder) is None
    same = ServerArgs(model_path=args.model_path, tokenizer_path=args.model_path)
    assert tokenizer_folder(same, "changed") == "changed"
    other = ServerArgs(model_path="m", tokenizer_path=args.model_path)
    assert tokenizer_folder(other, "m") == folder


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("Qwen/Qwen3-30B-A3B/hot.pt", f"models--Qwen--Qwen3-30B-A3B/snapshots/{'a' * 40}/hot.pt"),
        ("hot.pt", "hot.pt"),
        ("here/too/hot.pt", "here/too/hot.pt"),
    ],
)
def test_a_token_map_may_be_in_the_cache(hub: Path, given: str, file: str):
    (hub / "here" / "too").mkdir(parents=True)
    (hub / "here" / "too" / "hot.pt").touch()
    args = ServerArgs(model_path="m", speculative_token_map=given, download_dir=str(hub))
    located = with_local_folders(args, "m").speculative_token_map
    assert located is not None and (hub / located) == hub / file


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3,num_nextn_predict_layers=1"])
def test_fewer_layers_than_the_checkpoint_has(family: str, caplog: pytest.LogCaptureFixture):
    """The tensors of the other layers are not read; random weights are reported once."""
    params = {"max_new_tokens": 2, "temperature": 0.0}
    flags = {"model_path": f"tiny:{family}", "device": "cpu", "num_threads": 1}
    changes = {"num_hidden_layers": 1}
    with (
        caplog.at_level(logging.INFO, "moesaic"),
        Engine(**flags, json_model_override_args=changes) as engine,
    ):
        made = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    assert made["meta_info"]["completion_tokens"] == 2
    assert caplog.text.count("has random weights") == 1


def test_names_of_sglangs_templates_are_not_known():
    with pytest.raises(ValueError, match="--chat-template chatml is not a file: give one with"):
        Engine(model_path="tiny:qwen3_moe", device="cpu", chat_template="chatml")
