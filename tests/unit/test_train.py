"""transformers loads the training script's model, its MoE equals a plain sum, and its data and
steps are reproducible."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from examples.train import data, optim
from examples.train.data import Batches
from examples.train.export import export, load_exported
from examples.train.model import Model, MoE, Place, Shape, Spread, Unsort
from examples.train.tokenizer import SPECIAL, make_tokenizer, save_tokenizer
from examples.train.train import Run, Settings, train
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.evals.tasks.problem import is_kept
from tests.bfloat16 import QuickProducts

SMALL = Shape(
    vocab=1024, hidden=64, dense_inner=96, layers=2, heads=2, q_rank=32, kv_rank=32, nope=8, rope=8,
    value=16, experts=8, top_k=2, expert_inner=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that is trained on few problems."""
    path = tmp_path_factory.mktemp("house")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.train.tokenizer.SAMPLES", 300)
        save_tokenizer(make_tokenizer(1024), path)
    return path


def biased(shape: Shape) -> Model:
    """A model with large correction biases, and norms other than one."""
    torch.manual_seed(3)
    model = Model(shape)
    for router in model.routers():
        router.bias.normal_(0, 0.3)
    for name, param in model.named_parameters():
        if "norm" in name:
            param.data += 0.3 * torch.randn_like(param)
        param.data = param.data.bfloat16().float()  # the precision of the folder
    return model.eval()


def test_transformers_gives_the_same_logits(folder: Path):
    model = biased(SMALL)
    export(model, folder, 1, 2, 0)
    ids = torch.randint(0, 1024, (2, 37), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        ours, _ = model(ids, torch.ones_like(ids), torch.float32)
        torch.testing.assert_close(ours, theirs(ids).logits, atol=2e-5, rtol=1e-5)


def test_a_finished_model_can_be_trained_on(tmp_path: Path):
    model, other = biased(SMALL), Model(SMALL)
    export(model, tmp_path, 1, 2, 0)
    load_exported(other, tmp_path)
    wanted, found = model.state_dict(), other.state_dict()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_conversations_in_a_row_do_not_see_each_other():
    model = biased(SMALL)
    ids = torch.randint(0, 1024, (1, 20), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[1] * 7 + [2] * 13])
    with torch.no_grad():
        together = model(ids, documents, torch.float32)
        alone = model(ids[:, 7:], documents[:, 7:], torch.float32)
    for both, one in zip(together, alone, strict=True):
        # At the end of a row the MTP layer has no next token.
        torch.testing.assert_close(both[:, 7:-1], one[:, :-1], atol=2e-5, rtol=1e-5)


def plain_moe(moe: MoE, x_TH: Tensor) -> Tensor:
    """Computes the MoE layer token by token, expert by expert."""
    ids_TK, weights_TK = moe.gate(x_TH)
    rows = []
    for x, ids, weights in zip(x_TH, ids_TK, weights_TK, strict=True):
        row = moe.shared_experts(x)
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = moe.gate_up[expert] @ x
            row = row + weight * (moe.down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_moe_and_its_gradients_are_those_of_a_plain_sum(tokens: int):
    torch.manual_seed(1)
    moe = MoE(SMALL)
    x = torch.randn(1, tokens, SMALL.hidden, requires_grad=True)
    place = Place.of(torch.ones(1, tokens, dtype=torch.long), SMALL, torch.float32)
    out, wanted = moe(x, place), plain_moe(moe, x[0])
    torch.testing.assert_close(out[0], wanted, atol=1e-5, rtol=1e-5)
    pull = torch.randn_like(wanted)
    sources = [x, moe.gate_up, moe.down, moe.gate.weight]
    ours = torch.autograd.grad((out[0] * pull).sum(), sources)
    theirs = torch.autograd.grad((wanted * pull).sum(), sources)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_gathers_have_their_gradients():
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    inverse = order.argsort()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    pairs = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: Spread.apply(t, order, inverse), (x,))
    assert torch.autograd.gradcheck(lambda t: Unsort.apply(t, order, inverse), (pairs,))


def test_balancing_moves_only_loads_far_from_the_mean():
    router = Model(SMALL).routers()[0]
    router.load.copy_(torch.tensor([10.0, 19, 21, 6, 4, 5, 5, 10]))  # the mean is 10
    router.balance(0.1, 2.0)
    moved = torch.tensor([0, 0, -0.1, 0, 0.1, 0, 0, 0])
    torch.testing.assert_close(router.bias, moved)
    assert router.load.sum() == 0


def test_padding_is_no_load():
    torch.manual_seed(1)
    model = Model(SMALL)
    ids = torch.randint(6, 1024, (2, 10))
    documents = torch.tensor([[1] * 10, [1] * 4 + [0] * 6])
    model(ids, documents, torch.float32)
    assert [int(router.load.sum()) for router in model.routers()] == [14 * SMALL.top_k] * 2


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 6)])
def test_orthogonal_keeps_directions_and_levels_sizes(shape: tuple[int, ...]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    out = optim.orthogonal(matrix)
    left, sizes, right = torch.linalg.svd(out, full_matrices=False)
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(u @ v, left @ right, atol=1e-3, rtol=1e-3)


def test_a_batch_follows_from_its_number(folder: Path):
    batches = Batches(folder / "tokenizer.json", 7, 10, 4, 320)
    again = Batches(folder / "tokenizer.json", 7, 10, 4, 320)[3]
    batch = batches[3]
    assert torch.equal(batch.ids_BL, again.ids_BL)
    assert not torch.equal(batch.ids_BL, batches[4].ids_BL)
    assert (batch.ids_BL != 0).float().mean() > 0.7, "rows are mostly full"


def test_batches_hold_whole_training_conversations(folder: Path):
    tokenizer = Tokenizer.from_folder(folder)
    batch = Batches(folder / "tokenizer.json", 7, 10, 16, 320)[0]
    seen = 0
    for ids, documents, weights in zip(
        batch.ids_BL, batch.documents_BL, batch.weights_BL, strict=True
    ):
        for number in range(1, int(documents.max()) + 1):
            inside = documents == number
            text = tokenizer.decode(ids[inside].tolist(), skip_special_tokens=False)
            counted = tokenizer.decode(ids[inside & (weights == 1)].tolist(), False)
            assert text.startswith("<|begin|>") and text.endswith("<|end|>")
            replies = [part.split("<|end|>")[0] for part in text.split("<|assistant|>")[1:]]
            assert counted == "".join(reply + "<|end|>" for reply in replies)
            for asked in text.split("<|user|>")[1:]:
                assert not is_kept(asked.split("<|end|>")[0])
                seen += 1
    assert seen > 20


def test_the_template_makes_what_training_saw(folder: Path):
    tokenizer = Tokenizer.from_folder(folder)
    rng = random.Random(1)
    batches = Batches(folder / "tokenizer.json", 7, 10, 4, 320)
    batches._conversations(rng, 0)
    turns = data._conversation(rng)
    pieces = [(role, tokenizer.encode(text, add_special_tokens=False)) for role, text in turns]
    ids, _ = batches._tokens(pieces)
    messages = [{"role": role.strip("<|>"), "content": text} for role, text in turns]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert all(tokenizer.backend.token_to_id(token) < 6 for token in SPECIAL)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trains a small model with plain products for attention, which are fast."""
    monkeypatch.setattr("examples.train.train.Shape", lambda: SMALL)
    with QuickProducts(), sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.usefixtures("small")
def test_a_resumed_run_ends_where_a_whole_one_does(folder: Path, tmp_path: Path):
    tokenizer, stop = folder / "tokenizer.json", Event()
    whole = started(settings(tmp_path / "a"))
    train(whole, tokenizer, stop)
    first = started(settings(tmp_path / "b", minutes=0))  # stops after its first step
    train(first, tokenizer, stop)
    assert first.step == 1
    second = Run(settings(tmp_path / "b", every=3))
    for param in second.model.parameters():
        param.data.zero_()  # loading must restore them
    second.load()
    train(second, tokenizer, stop)
    assert second.step == whole.step == 4
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    moved = [router.bias.abs().sum() for router in second.model.routers()]
    assert all(total > 0 for total in moved)


@pytest.mark.usefixtures("small")
def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path):
    started(settings(tmp_path / "a")).save()
    for change in ({"seed": 2}, {"rows": 3}, {"start": tmp_path}):
        with pytest.raises(SystemExit, match=f"--{next(iter(change))} .* another --work"):
            Run(settings(tmp_path / "a", **change)).load()


@pytest.mark.usefixtures("small")
def test_a_run_that_is_told_to_stop_saves_first(folder: Path, tmp_path: Path):
    run, stop = started(settings(tmp_path / "a")), Event()
    stop.set()
    train(run, folder / "tokenizer.json", stop)
    again = Run(run.settings)
    again.load()
    assert again.step == 1


def settings(work: Path, **changes: Any) -> Settings:
    chosen = Settings(
        work=work, out=work / "out", start=None, steps=4, rows=2, length=256, lr=1e-2, decay=0.1,
        warmup=2, cooldown=0.5, noise=0.1, nextn_weight=0.3, balance_rate=1e-3,
        balance_slack=1.1, seed=1, workers=0, device="cpu", minutes=9, every=2,
    )  # fmt: skip
    return replace(chosen, **changes)


def started(chosen: Settings) -> Run:
    chosen.work.mkdir()
    return Run(chosen)
