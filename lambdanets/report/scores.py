"""Metrics of predictions, in total and per class. Letters: N examples, C classes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassRow:
    """Results of one class.

    `recall` is the share of its images that are predicted correctly, `precision` the share of its predictions that are
    correct; both are None if there is nothing to divide by.
    """

    index: int
    examples: int
    recall: float | None
    precision: float | None
    taken_for: int | None  # the class that is most often predicted by mistake
    taken_for_count: int = 0

    @property
    def f1(self) -> float | None:
        if self.recall is None or self.precision is None:
            return None
        total = self.recall + self.precision
        return 2 * self.recall * self.precision / total if total else 0.0


@dataclass(frozen=True)
class Mistake:
    """A wrong prediction: the row of the example, its true class and the predicted one, with their probabilities."""

    row: int
    label: int
    answer: int
    label_probability: float
    answer_probability: float


def labelled(logits_NC: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits in float32 and labels of the examples that have a valid label and finite logits."""
    logits_NC = logits_NC.float()
    known_N = (labels_N >= 0) & (labels_N < logits_NC.shape[1]) & logits_NC.isfinite().all(1)
    return logits_NC[known_N], labels_N[known_N].long()


def accuracy(logits_NC: Tensor, labels_N: Tensor, k: int = 1) -> float:
    """Return the share of examples whose class is among the k highest logits; nan if there are no examples."""
    if not len(labels_N):
        return float("nan")
    best = logits_NC.topk(min(k, logits_NC.shape[1]), dim=1).indices
    return float((best == labels_N[:, None]).any(1).float().mean())


def confusion(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the confusion matrix, int64 [C, C]: rows are true classes, columns are predicted classes."""
    classes = logits_NC.shape[1]
    pairs_N = labels_N * classes + logits_NC.argmax(1)
    return torch.bincount(pairs_N, minlength=classes * classes).view(classes, classes)


def by_class(matrix_CC: Tensor) -> list[ClassRow]:
    """Return a row for each class, ordered by recall; classes without examples come last."""
    examples_C, answers_C, right_C = matrix_CC.sum(1), matrix_CC.sum(0), matrix_CC.diagonal()
    wrong_CC = matrix_CC - torch.diag(right_C)
    count_C, taken_C = wrong_CC.max(1)
    rows = []
    for i, (examples, answers, right) in enumerate(
        zip(examples_C.tolist(), answers_C.tolist(), right_C.tolist(), strict=True)
    ):
        mistaken = int(count_C[i])
        rows.append(
            ClassRow(
                index=i,
                examples=examples,
                recall=right / examples if examples else None,
                precision=right / answers if answers else None,
                taken_for=int(taken_C[i]) if mistaken else None,
                taken_for_count=mistaken,
            )
        )
    return sorted(rows, key=lambda row: (row.recall is None, row.recall or 0.0, row.precision or 0.0, row.index))


def confused_pairs(matrix_CC: Tensor, limit: int = 10) -> list[tuple[int, int, int]]:
    """Return (true class, predicted class, count) of the most frequent mistakes."""
    wrong = (matrix_CC - torch.diag(matrix_CC.diagonal())).flatten()
    order = torch.sort(wrong, descending=True, stable=True).indices[:limit].tolist()
    classes = len(matrix_CC)
    return [(i // classes, i % classes, int(wrong[i])) for i in order if wrong[i] > 0]


def hardest(logits_NC: Tensor, labels_N: Tensor, limit: int = 24) -> list[Mistake]:
    """Return the most confident mistakes: those in which the true class has the lowest probability."""
    known_N = (labels_N >= 0) & (labels_N < logits_NC.shape[1]) & logits_NC.isfinite().all(1)
    rows_W = (known_N & (logits_NC.argmax(1) != labels_N)).nonzero().flatten()
    logs_WC = logits_NC[rows_W].double().log_softmax(1)
    true_W = labels_N[rows_W].long()
    true_log_W = logs_WC.gather(1, true_W[:, None]).flatten()
    order = torch.sort(true_log_W, stable=True).indices[:limit]
    answers_W = logs_WC.argmax(1)
    return [
        Mistake(
            row=int(rows_W[i]),
            label=int(true_W[i]),
            answer=int(answers_W[i]),
            label_probability=float(true_log_W[i].exp()),
            answer_probability=float(logs_WC[i, answers_W[i]].exp()),
        )
        for i in order.tolist()
    ]
