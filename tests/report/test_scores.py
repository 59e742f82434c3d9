"""Scores by class, beside plain loops over the examples."""

import math

import pytest
import torch

from lambdanets.report import scores

CLASSES, EXAMPLES = 7, 300


@pytest.fixture
def made() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, CLASSES - 1, (EXAMPLES,))  # the last class has no examples
    logits = torch.randn(EXAMPLES, CLASSES)
    logits[torch.arange(EXAMPLES), labels] += 1.5
    return logits, labels


def test_confusion_and_rows_by_class(made):
    logits, labels = made
    pairs = list(zip(labels.tolist(), logits.argmax(1).tolist(), strict=True))
    matrix = scores.confusion(logits, labels)
    assert all(matrix[i, j] == pairs.count((i, j)) for i in range(CLASSES) for j in range(CLASSES))
    rows = {row.index: row for row in scores.by_class(matrix)}
    for i in range(CLASSES):
        examples, answers = [p for p in pairs if p[0] == i], [p for p in pairs if p[1] == i]
        right = pairs.count((i, i))
        assert rows[i].examples == len(examples)
        assert rows[i].recall == (right / len(examples) if examples else None)
        assert rows[i].precision == (right / len(answers) if answers else None)
        wrong = [p[1] for p in examples if p[1] != i]
        if wrong:
            assert wrong.count(rows[i].taken_for) == rows[i].taken_for_count == max(map(wrong.count, wrong))
    recalls = [row.recall for row in scores.by_class(matrix)]
    assert recalls[-1] is None
    assert recalls[:-1] == sorted(recalls[:-1])
    i, j, n = scores.confused_pairs(matrix)[0]
    assert (
        n == max(pairs.count((a, b)) for a in range(CLASSES) for b in range(CLASSES) if a != b) == pairs.count((i, j))
    )


def test_accuracy(made):
    logits, labels = made
    ranks = [sorted(row, reverse=True).index(row[label]) for row, label in zip(logits.tolist(), labels, strict=True)]
    for k in (1, 3, 50):
        assert math.isclose(scores.accuracy(logits, labels, k), sum(r < k for r in ranks) / EXAMPLES, rel_tol=1e-6)


def test_the_hardest_mistakes(made):
    logits, labels = made
    found = scores.hardest(logits, labels, limit=10)
    probabilities = logits.double().softmax(1)
    wrong = [n for n in range(EXAMPLES) if int(logits[n].argmax()) != labels[n]]
    expected = sorted(wrong, key=lambda n: float(probabilities[n, labels[n]]))[:10]
    assert [one.row for one in found] == expected
    for one in found:
        assert one.label == labels[one.row]
        assert one.answer == logits[one.row].argmax()
        assert math.isclose(one.label_probability, probabilities[one.row, one.label], rel_tol=1e-9)
        assert math.isclose(one.answer_probability, probabilities[one.row].max(), rel_tol=1e-9)


def test_what_has_no_label_or_no_number_does_not_count():
    logits = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [0.0, 1.0], [1.0, 0.0]])
    labels = torch.tensor([0, 0, -1, 1])
    kept = scores.labelled(logits.half(), labels)
    assert scores.confusion(*kept).tolist() == [[1, 0], [1, 0]]
    assert [one.row for one in scores.hardest(logits, labels)] == [3]
    assert math.isnan(scores.accuracy(logits[:0], labels[:0]))
