"""Batches of conversations. A batch follows from the seed and its number alone, so that a run can
be stopped, resumed and repeated, with any number of workers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from examples.train.tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER
from moesaic.evals.tasks.draw import TASKS, split_of
from moesaic.evals.tasks.problem import Problem

MIX = {"words": 28, "lists": 16, "lookup": 20, "units": 15, "tables": 16, "chat": 5}
ASKED_WEIGHT = 0.1  # of a prompt's tokens in the loss; those of a reply count 1
SECOND_TURN, WITH_SYSTEM = 0.12, 0.12
SYSTEMS = (
    "You are a helpful assistant.",
    "You are House, a small model of the Moesaic project.",
    "Answer briefly.",
    "You are a careful assistant. Show your steps.",
    "Be helpful and honest.",
    "You solve short problems.",
)
OPEN_ROWS = 8  # where the next conversation may still fit


@dataclass(frozen=True)
class Row:
    """Token ids, the number of their conversation in the row (0 is padding), and their weight as
    something to be predicted."""

    ids: list[int]
    documents: list[int]
    weights: list[float]

    def add(self, conversation: tuple[list[int], list[float]]) -> None:
        ids, weights = conversation
        number = self.documents[-1] + 1 if self.documents else 1
        self.ids.extend(ids)
        self.documents.extend([number] * len(ids))
        self.weights.extend(weights)


@dataclass(frozen=True)
class Batch:
    ids_BL: Tensor
    documents_BL: Tensor
    weights_BL: Tensor


class Batches(Dataset[Batch]):
    def __init__(self, tokenizer: Path, seed: int, number: int, rows: int, length: int) -> None:
        self._file, self._seed, self._number = tokenizer, seed, number
        self._rows, self._length = rows, length
        self._tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Batch:
        rng = random.Random(f"{self._seed} {index}")
        done: list[Row] = []
        opened = [Row([], [], []) for _ in range(OPEN_ROWS)]
        while len(done) < self._rows:
            for conversation in self._conversations(rng, 4 * self._rows):
                self._place(conversation, opened, done)
        return self._tensors(done[: self._rows])

    def _place(
        self, conversation: tuple[list[int], list[float]], opened: list[Row], done: list[Row]
    ) -> None:
        size = len(conversation[0])
        if size > self._length:
            return
        for row in opened:
            if len(row.ids) + size <= self._length:
                row.add(conversation)
                return
        fullest = max(range(OPEN_ROWS), key=lambda i: len(opened[i].ids))
        done.append(opened[fullest])
        opened[fullest] = Row([], [], [])
        opened[fullest].add(conversation)

    def _conversations(
        self, rng: random.Random, number: int
    ) -> list[tuple[list[int], list[float]]]:
        if self._tokenizer is None:  # made in the worker
            self._tokenizer = Tokenizer.from_file(str(self._file))
        drawn = [_conversation(rng) for _ in range(number)]
        texts = [text for turns in drawn for _, text in turns]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [self._tokens([(role, next(encoded).ids) for role, _ in turns]) for turns in drawn]

    def _tokens(self, turns: list[tuple[str, list[int]]]) -> tuple[list[int], list[float]]:
        assert self._tokenizer is not None
        special = self._tokenizer.token_to_id
        ids, weights = [special(BEGIN)], [0.0]
        for role, text in turns:
            weight = 1.0 if role == ASSISTANT else ASKED_WEIGHT
            ids += [special(role), *text, special(END)]
            weights += [0.0, *[weight] * len(text), 1.0 if role == ASSISTANT else 0.0]
        return ids, weights

    def _tensors(self, rows: list[Row]) -> Batch:
        shape = (len(rows), self._length)
        ids, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights = np.zeros(shape, np.float32)
        for number, row in enumerate(rows):
            size = len(row.ids)
            ids[number, :size] = row.ids
            documents[number, :size] = row.documents
            weights[number, :size] = row.weights
        return Batch(*map(torch.from_numpy, (ids, documents, weights)))


def _conversation(rng: random.Random) -> list[tuple[str, str]]:
    turns = [(SYSTEM, rng.choice(SYSTEMS))] if rng.random() < WITH_SYSTEM else []
    for _ in range(2 if rng.random() < SECOND_TURN else 1):
        problem = _problem(rng)
        turns += [(USER, problem.prompt), (ASSISTANT, problem.solution)]
    return turns


def _problem(rng: random.Random) -> Problem:
    task = rng.choices(list(MIX), list(MIX.values()))[0]
    while split_of(problem := TASKS[task](rng)) != "train":
        pass
    return problem
