"""What one rank records: counts and tokens, also of padded rows and of tokens on the device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic import Engine
from moesaic.cli.main import main
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs, resolve
from moesaic.core.overlap import Overlap
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend import expert_records
from moesaic.engine.frontend.expert_records import FOLDER_VARIABLE, ExpertRecords, RecordNotWritten
from moesaic.engine.frontend.queries import QueryTimeout, RankAnswers, RankReply
from moesaic.engine.runner import expert_recorder
from moesaic.engine.runner.expert_recorder import RecorderState
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.plan import PlanItem, StepAgreement, StepPlan
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from tests.e2e.grid import arguments, model_path
from tests.e2e.recorded import (
    check_counts,
    check_tokens,
    expected_counts,
    oracle_of,
    record,
)

MODEL = model_path("deepseek_v3")
PROMPTS = [[7], [9, 8, 7, 6, 5], [11, *range(20, 43)]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "dumps"))
    return tmp_path / "dumps"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=MODEL, expert_distribution_recorder_mode="stat") as made:
        yield made


def test_counts_of_each_pass(engine: Engine, folder: Path) -> None:
    oracle, experts = oracle_of(MODEL), engine.get_stats().num_experts
    (ids,) = record(engine, PROMPTS[1:2], 4)
    found = engine.dump_expert_distribution_record()
    assert found["passes"] == 4 and found["passes_incomplete"] == found["passes_lost"] == 0
    (path,) = map(Path, found["files"])
    assert path.parent == folder and path.name.startswith("expert_distribution_recorder_")
    dump = torch.load(path, weights_only=True)
    assert dump.keys() == {"rank", "logical_count", "average_utilization_rate_over_window"}
    assert dump["rank"] == 0 and dump["average_utilization_rate_over_window"] == 1.0
    for number, counts in enumerate(dump["logical_count"]):
        # The first pass has the prompt, the others one token each.
        end = len(PROMPTS[1]) + number
        whole = expected_counts(oracle, [ids[: end + 1]], experts)
        before = expected_counts(oracle, [ids[:end]], experts) if number else 0
        assert counts.tolist() == (whole - before).tolist()


def test_a_dump_feeds_the_balancer(
    engine: Engine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sequences = record(engine, PROMPTS, 5)
    found = engine.dump_expert_distribution_record()
    check_counts(found, oracle_of(MODEL), sequences, folder)
    assert main(["balance", found["files"][0], "--ep", "4", "--algorithms", "auto"]) == 0
    told = capsys.readouterr().out
    assert "3 layers of 8 experts on 4 ranks; planned from" in told


def test_a_dump_that_cannot_be_written_loses_nothing(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = record(engine, PROMPTS, 3)
    folder.write_text("a file")
    with pytest.raises(RecordNotWritten, match=f"{folder}: .*nothing is lost"):
        engine.dump_expert_distribution_record()
    monkeypatch.setenv(FOLDER_VARIABLE, "/dev/full/x")
    with pytest.raises(RecordNotWritten, match="/dev/full/x: Not a directory"):
        engine.dump_expert_distribution_record()
    folder.unlink()
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    check_counts(engine.dump_expert_distribution_record(), oracle_of(MODEL), sequences, folder)
    empty = engine.dump_expert_distribution_record()
    assert empty["passes"] == 0
    assert torch.load(empty["files"][0], weights_only=True)["logical_count"].shape == (0, 4, 8)


def test_a_full_disk_is_named(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RecordNotWritten, match=f"{folder}/expert_.*pt: No space left on device"):
        engine.dump_expert_distribution_record()
    assert list(folder.iterdir()) == []


def test_without_the_flag() -> None:
    records = ExpertRecords(lambda *_: None, ServerArgs(), Mesh(), 1)
    for call in (records.start, records.stop, records.dump):
        with pytest.raises(ValueError, match="with --expert-distribution-recorder-mode stat"):
            call()


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: dict[int, RankReply] = {0: RankReply(RecorderState(), 0, 0)}
    args = ServerArgs(expert_distribution_recorder_mode="stat")
    records = ExpertRecords(lambda *_: RankAnswers(replies), args, Mesh(tp=2, ep=2), 1)
    with pytest.raises(QueryTimeout, match=r"rank 1 \(tp 1, ep 1\) did not answer within 60 s"):
        records.start()
    replies[1] = RankReply(RecorderState(pending=1), 0, 0)
    monkeypatch.setattr(expert_records, "ANSWER_SECONDS", 0.05)
    with pytest.raises(QueryTimeout, match=r"rank 1 \(.*\) did not finish the recorded passes"):
        records.dump()


LINES = (
    "--tp 2 --ep 2",
    "--tp 2 --ep 2 --ep-num-redundant-experts 2",
    "--tp 2 --dp 2",
    "--tp 2 --moe-a2a-backend deepep --deepep-mode normal",
    "--tp 2 --moe-a2a-backend deepep --deepep-mode low_latency",
    "--tp 3 --enable-dp-attention --dp 3 --moe-a2a-backend deepep --ep-num-redundant-experts 1",
    "--tp 4 --ep 2 --moe-a2a-backend deepep",
    "--tp 2 --moe-a2a-backend mori",
    "--tp 2 --moe-a2a-backend mooncake",
    "--tp 2 --enable-dp-attention --dp 2 --moe-a2a-backend flashinfer",
    "--tp 2 --enable-dp-attention --dp 2 --moe-a2a-backend ascend_fuseep",
    "--pp 2 --enable-deterministic-inference",
    "--tp 2 --ep 2 --ep-num-redundant-experts 2 --enable-eplb --eplb-rebalance-num-iterations 2 "
    "--expert-distribution-recorder-buffer-size 200",
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stat", "per_token"])
@pytest.mark.parametrize("line", LINES)
def test_every_backend_records_the_same(line: str, mode: str, folder: Path) -> None:
    args = arguments(f"deepseek_v3 {line} --expert-distribution-recorder-mode {mode}")
    given = {
        key: value for key, value in asdict(args).items() if value != getattr(ServerArgs(), key)
    }
    with Engine(**given) as engine:
        sequences = record(engine, PROMPTS, 20 if args.enable_eplb else 4)
        found = engine.dump_expert_distribution_record()
        moves = engine.get_stats().ranks[0].moves
    assert moves.rebalances > 0 or not args.enable_eplb
    check_counts(found, oracle_of(MODEL), sequences, folder)
    if mode == "per_token":
        check_tokens(found, oracle_of(MODEL), sequences)


def graph_core(**flags: Any) -> LocalCore:
    """Steps as a GPU computes them: padded to fixed sizes, with tokens that the host gets later."""
    args = resolve(
        ServerArgs.from_kwargs(
            model_path=MODEL, expert_distribution_recorder_mode="per_token", **flags
        )
    )
    args = replace(args, model_path=materialise(args.model_path), cuda_graph_bs=(4, 8))
    return LocalCore(args, ModelRunner(args, asynchronous=True))


def serve(core: LocalCore, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    core.planner.kv.flush()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = [
        Request(str(n), prompt, params, n, new_tokens, n) for n, prompt in enumerate(prompts)
    ]
    for one in requests:
        core.add(RequestState(one, None, lambda progress: None))
    while core.has_work:
        core.step()
    return [one.token_ids for one in requests]


def records_of(core: LocalCore) -> ExpertRecords:
    def ask(what: str, options: dict[str, Any]) -> Any:
        answer: Future[Any] = Future()
        core.ask(what, answer, options)
        return answer.result()

    return ExpertRecords(ask, core.args, Mesh(), core.facts.num_layers)


def test_tokens_of_padded_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_recorder, "CHUNK_BYTES", 700)
    core = graph_core(expert_distribution_recorder_buffer_size=20)
    records = records_of(core)
    serve(core, PROMPTS, 2)
    records.start()
    sequences = serve(core, PROMPTS, 6)
    assert core.runner.overlaps and core.runner.steps.graphs.sizes == (4, 8)
    found = records.dump().as_dict()  # it goes on
    check_tokens(found, oracle_of(MODEL), sequences)
    check_counts(found, oracle_of(MODEL), sequences, folder)
    (content,) = (torch.load(path, weights_only=True) for path in found["files"])
    modes = [one["forward_mode"] for one in content["records"]]
    assert modes[0] in (1, 3) and modes[-1] == 2
    assert content["records"][0]["extend_seq_lens"] == [1, 5, 24]
    assert content["records"][-1]["extend_seq_lens"] is None
    serve(core, PROMPTS[:1], 40)
    records.stop()
    late = records.dump()
    assert late.passes == 20 and late.lost == 20 and late.tokens_dropped == 0
    assert late.files != found["files"]


def test_tokens_that_a_small_ring_drops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_recorder, "TOKEN_RING_BYTES", 6 * (2 * 2 * 2 + 8))
    monkeypatch.setattr(expert_recorder, "CHUNK_BYTES", 40)
    core = graph_core()
    records = records_of(core)
    records.start()
    (ids,) = serve(core, [PROMPTS[2]], 5)
    found = records.dump()
    computed = len(ids) - 1
    (content,) = (torch.load(path, weights_only=True) for path in found.files)
    told = content["records"]
    assert found.tokens_dropped == sum(one["tokens_dropped"] for one in told) == computed - 4
    assert [len(one["input_ids"]) for one in told] == [0, 1, 1, 1, 1]
    assert [one["input_ids"].tolist() for one in told[1:]] == [[token] for token in ids[-5:-1]]
    total = np.sum([one["global_physical_count"].sum(-1).numpy() for one in told], 0)
    assert max(total) == computed * core.runner.top_k, "counts are whole all the same"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_in_halves_keeps_no_tokens(asynchronous: bool) -> None:
    """A rank may begin to record before the leader of its group, which has such a step then."""
    given = {"model_path": MODEL, "expert_distribution_recorder_mode": "per_token"}
    args = resolve(ServerArgs.from_kwargs(**given))
    path = materialise(args.model_path)
    args = replace(args, model_path=path, overlap="tbo", cuda_graph_bs=(4,))
    runner = ModelRunner(args, asynchronous=asynchronous)
    recorder, kinds = runner.recorder, (Overlap.OFF, Overlap.TBO, Overlap.OFF)
    assert recorder is not None
    recorder.start()
    plan = StepPlan([PlanItem(n, [7 + n], 0, n, [1 + n]) for n in range(4)])
    for overlap in kinds:
        first = (2,) if overlap else ()
        agreement = StepAgreement(1, (4,), (0,), overlap=overlap, first_half=first)
        runner.begin(plan, agreement).wait()
    state = recorder.state()
    found = [one.tokens for one in recorder.read(state.first, state.end).passes]
    assert [span.count for span in found if span is not None] == [4, 0, 4]
