"""bench/mtp.py counts what a drafting engine would have accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import mtp
from bench.mtp import Models, Reply, Score, answer, batches, score
from moesaic import Engine
from moesaic.models.tiny import make_tiny_checkpoint
from tests.unit.test_nextn import ids_of, write


def test_drafts_against_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MTP layer predicts every third token of the replies, which may be empty."""
    oracle = write(tmp_path, own=False)
    models = Models.load(tmp_path, "float32")
    lengths = ((9, 14), (3, 1), (1, 2), (20, 0), (5, 30))
    replies, expected = [], 0
    for (prompt, _), ids in zip(lengths, ids_of(tuple(map(sum, lengths)), 320), strict=True):
        for row in range(prompt - 1, len(ids) - 2):
            if row % 3 == 0:
                with torch.no_grad():
                    ids[row + 2] = int(oracle.logits(ids[: row + 2])[0][-1].argmax())
        with torch.no_grad():
            foreseen = oracle.logits(ids)[0].argmax(-1).tolist() if len(ids) > 1 else []
        right = [foreseen[row] == ids[row + 2] for row in range(prompt - 1, len(ids) - 2)]
        expected += sum(right)
        replies.append(Reply(ids[:prompt], ids[prompt:]))
    drafts = 13 + 0 + 1 + 0 + 29
    assert 13 <= expected < drafts
    assert score(models, replies) == Score(5, 47, drafts, expected)
    monkeypatch.setattr(mtp, "BATCH_TOKENS", 30)
    assert [len(batch) for batch in batches(replies)] == [3, 1, 1]
    assert score(models, replies) == Score(5, 47, drafts, expected)


def test_a_smaller_run_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run replaces no larger result and no other file; it checks before it loads a model."""
    out, problems = tmp_path / "out.json", 3 * len(mtp.TASKS)
    monkeypatch.setattr(mtp.Models, "load", lambda folder, dtype: 1 / 0)
    words = ["mtp", "--model-path", str(tmp_path), "--num", "3", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    out.write_text(json.dumps({"tasks": {"all": {"problems": problems + 1}}}))
    with pytest.raises(SystemExit, match=f"is of {problems + 1} problems and this run of"):
        mtp.main()
    for text in ("{}", "[1]", "not JSON", '{"tasks": 3}'):
        out.write_text(text)
        with pytest.raises(SystemExit, match="is there and not of this benchmark"):
            mtp.main()
    monkeypatch.setattr("sys.argv", [*words, "--again"])
    with pytest.raises(ZeroDivisionError):
        mtp.main()
    monkeypatch.setattr("sys.argv", words)
    out.write_text(json.dumps({"tasks": {"all": {"problems": problems}}}))
    with pytest.raises(ZeroDivisionError):
        mtp.main()


def test_totals() -> None:
    total = Score.total([Score(1, 10, 8, 6), Score(2, 5, 2, 2), Score(1, 1, 0, 0)])
    assert total == Score(4, 16, 10, 8)
    assert total.as_json()["share"] == 0.8 and total.as_json()["accepted_length"] == 1.8
    assert replace(total, drafts=0, right=0).share == 0.0


def test_replies_are_greedy_chats(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("deepseek_v3", tmp_path, changes={"num_nextn_predict_layers": 1})
    with Engine(model_path=str(folder), log_level="warning", max_total_tokens=4096) as engine:
        replies = answer(engine, ["Hello", "2 + 3?"])
        tokenizer = engine.tokenizer
    assert tokenizer is not None
    texts = [tokenizer.decode(r.prompt_ids, skip_special_tokens=False) for r in replies]
    assert texts == [f"<|turn|>user\n{p}<|end|><|turn|>assistant\n" for p in ("Hello", "2 + 3?")]
    models = Models.load(folder, "auto")
    for reply in replies:
        head = Reply(reply.prompt_ids, reply.reply_ids[:40])
        assert len(models.drafted([head])[0]) == len(head.reply_ids) - 1
