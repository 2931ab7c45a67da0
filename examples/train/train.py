"""Trains the house model. On one GPU minutes, on a CPU days; stop it and start it again at will.

    python -m examples.train.train --work build/house

`--work` holds the checkpoint; `--out` gets the Hugging Face folder at the
end. With the same arguments the same data comes in the same order."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from examples.train.data import Batch, Batches
from examples.train.export import export, load_exported
from examples.train.model import Model, Shape
from examples.train.optim import optimizers
from examples.train.picture import draw_losses
from examples.train.scores import score
from examples.train.tokenizer import BEGIN, END, PAD, make_tokenizer, save_tokenizer


@dataclass(frozen=True)
class Settings:
    work: Path
    out: Path
    start: Path | None
    steps: int
    rows: int
    length: int
    lr: float
    decay: float
    warmup: int
    cooldown: float
    noise: float
    nextn_weight: float
    balance_rate: float
    balance_slack: float
    seed: int
    workers: int
    device: str
    minutes: float
    every: int


def read_settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known: list[tuple[str, Any, str]] = [
        ("work", Path("build/house"), "folder of the checkpoint"),
        ("out", Path("build/house-moe"), "folder of the finished model"),
        ("steps", 15000, "optimizer steps in all"),
        ("rows", 128, "rows of a batch"),
        ("length", 512, "tokens of a row"),
        ("lr", 4e-3, "highest learning rate"),
        ("decay", 0.1, "weight decay"),
        ("warmup", 200, "steps until the highest learning rate"),
        ("cooldown", 0.5, "share of the steps in which it falls to nothing at the end"),
        ("noise", 0.1, "noise on matrices while it falls: about what rounding to 4 bits does"),
        ("nextn_weight", 0.3, "weight of the MTP layer's loss"),
        ("balance_rate", 1e-3, "how fast the routers' correction biases move"),
        ("balance_slack", 2.0, "loads between mean / this and mean * this are left alone"),
        ("seed", 1, "seed of weights and data"),
        ("workers", max(1, (os.cpu_count() or 1) - 2), "processes that make batches"),
        ("device", device, "cuda or cpu"),
        ("minutes", 1e9, "save and stop after this many minutes; a later run resumes"),
        ("every", 500, "steps between checkpoints"),
    ]
    parser.add_argument(
        "--start", type=Path, help="finished model to go on from, and its tokenizer"
    )
    for name, default, text in known:
        flag = "--" + name.replace("_", "-")
        kind = type(default)
        parser.add_argument(flag, type=kind, default=default, help=f"{text} ({default})")
    return Settings(**vars(parser.parse_args()))


def losses(model: Model, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of the next token and of the one after it; a token's weight counts where it is predicted
    from its own conversation."""
    outputs = model(batch.ids_BL, batch.documents_BL, dtype)
    found = []
    for ahead, logits in enumerate(outputs, 1):
        same = batch.documents_BL[:, ahead:] == batch.documents_BL[:, :-ahead]
        weights = (batch.weights_BL[:, ahead:] * same).flatten()
        targets = batch.ids_BL[:, ahead:].flatten()
        loss = F.cross_entropy(logits[:, :-ahead].flatten(0, 1).float(), targets, reduction="none")
        found.append((loss * weights).sum() / weights.sum())
    return found[0], found[1]


def rate(step: int, settings: Settings) -> float:
    """Share of the learning rate: up, flat, down."""
    left = (settings.steps - step) / (settings.steps * settings.cooldown)
    return min(1.0, (step + 1) / settings.warmup, left)


def falling(step: int, settings: Settings) -> bool:
    return step >= settings.steps * (1 - settings.cooldown)


# What may differ when a run goes on.
FREE = ("out", "workers", "device", "minutes", "every")


class Run:
    """A model in training: all that a checkpoint holds."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.dtype = torch.bfloat16
        self.model = Model(Shape()).to(settings.device)
        self.optimizers: list[Optimizer] = optimizers(self.model, settings.lr, settings.decay)
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, float]] = []
        self.file = settings.work / "checkpoint.safetensors"

    def save(self) -> None:
        about = {
            "settings": self.fixed(),
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
        }
        part = self.file.with_suffix(".part")
        save_file(self.tensors(), part, metadata={"run": json.dumps(about)})
        part.replace(self.file)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for param, state in optimizer.state_dict()["state"].items():
                found |= {f"optimizer.{number}.{param}.{key}": v for key, v in state.items()}
        return {name: value.contiguous() for name, value in found.items()}

    def fixed(self) -> dict[str, str]:
        return {k: str(v) for k, v in asdict(self.settings).items() if k not in FREE}

    def load(self) -> None:
        with safe_open(self.file, "pt", device=self.settings.device) as stored:
            about = json.loads(stored.metadata()["run"])
            self.check(about["settings"])
            values = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        weights = {}
        for name, value in values.items():
            kind, rest = name.split(".", 1)
            if kind == "model":
                weights[rest] = value
            else:
                number, param, key = rest.split(".")
                states[int(number)].setdefault(int(param), {})[key] = value
        self.model.load_state_dict(weights)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.step, self.seconds, self.log = about["step"], about["seconds"], about["log"]

    def check(self, was: dict[str, str]) -> None:
        now = self.fixed()
        if others := [f"--{k} {was[k]} (now {now[k]})" for k in now if was[k] != now[k]]:
            raise SystemExit(
                f"{self.file} is of a run with {', '.join(others)}: "
                "give the same, or another --work"
            )

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        share = rate(self.step, self.settings)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.lr * share
        torch.manual_seed(self.settings.seed + self.step)  # of the noise, for a resumed run too
        self.model.set_noise(self.settings.noise if falling(self.step, self.settings) else 0.0)
        main, ahead = losses(self.model, batch, self.dtype)
        (main + self.settings.nextn_weight * ahead).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for router in self.model.routers():
            router.balance(self.settings.balance_rate * share, self.settings.balance_slack)
        self.step += 1
        return main.detach(), ahead.detach()


def moved(batch: Batch, device: str) -> Batch:
    return Batch(
        *(
            tensor.to(device, non_blocking=True)
            for tensor in (batch.ids_BL, batch.documents_BL, batch.weights_BL)
        )
    )


def only(items: list[Batch]) -> Batch:
    return items[0]


def quiet(_: int) -> None:
    """Workers leave Ctrl-C to the run, which saves first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def loader_of(run: Run, tokenizer: Path) -> DataLoader[Batch]:
    settings = run.settings
    data = Batches(tokenizer, settings.seed, settings.steps, settings.rows, settings.length)
    return DataLoader(
        Subset(data, range(run.step, settings.steps)),
        batch_size=1,
        collate_fn=only,
        num_workers=settings.workers,
        prefetch_factor=8 if settings.workers else None,
        multiprocessing_context="spawn" if settings.workers else None,
        worker_init_fn=quiet,
        pin_memory=settings.device == "cuda",
    )


def train(run: Run, tokenizer: Path, stop: Event) -> None:
    """Until the last step, `--minutes`, or `stop`, which ends it between two steps; what was done
    is saved in each case."""
    settings = run.settings
    loader = loader_of(run, tokenizer)
    started, before = time.perf_counter(), run.seconds
    progress = tqdm(loader, initial=run.step, total=settings.steps, unit="step", mininterval=5)
    for batch in progress:
        main, ahead = run.train_step(moved(batch, settings.device))
        if run.step % 20 == 0 or run.step == settings.steps:
            values = {"step": run.step, "loss": main.item(), "nextn": ahead.item()}
            run.log.append(values)
            progress.set_postfix({"loss": values["loss"], "mtp": values["nextn"]}, refresh=False)
        run.seconds = before + time.perf_counter() - started
        if run.step % settings.every == 0:
            run.save()
        if stop.is_set() or run.seconds - before > settings.minutes * 60:
            break
    run.save()


def finish(run: Run, tokenizer: Tokenizer, file: Path) -> None:
    settings = run.settings
    ids = [tokenizer.token_to_id(token) for token in (BEGIN, END, PAD)]
    size = export(run.model, settings.out, *ids)
    save_tokenizer(tokenizer, settings.out)
    draw_losses(run.log, settings.out / "loss.png")
    scores = score(run.model, file, settings.device, run.dtype)
    record = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()},
        "step": run.step,
        "seconds": round(run.seconds),
        "tokens": run.step * settings.rows * settings.length,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "scores": scores,
    }
    (settings.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{settings.out}: {size / 1e6:.2f} MB after {run.step} steps, {run.seconds:.0f} s")
    for task, values in scores.items():
        print(f"  {task:8} " + "  ".join(f"{k} {v:.4f}" for k, v in values.items()))


def main() -> None:
    settings = read_settings()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    settings.work.mkdir(parents=True, exist_ok=True)
    file = settings.work / "tokenizer.json"
    run = Run(settings)
    if settings.start is not None:
        load_exported(run.model, settings.start)
    if not file.exists():
        made = settings.start and Tokenizer.from_file(str(settings.start / "tokenizer.json"))
        (made or make_tokenizer(run.model.shape.vocab)).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    if run.file.exists():
        run.load()
        print(f"resuming at step {run.step}")
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    train(run, file, stop)
    if run.step < settings.steps:
        raise SystemExit(f"stopped after step {run.step} and saved: the same command goes on")
    finish(run, tokenizer, file)


if __name__ == "__main__":
    main()
