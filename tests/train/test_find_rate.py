"""The learning-rate finder, where the largest stable rate is known."""

import json

import pytest
import torch
from torch import nn

from lambdanets.cli import main
from lambdanets.train.config import Optimizer, Schedule
from lambdanets.train.find_rate import find_rate
from lambdanets.train.task import Outcome, Task
from tests.train.tasks import config


class Quadratic(Task):
    """loss = curvature / 2 * |w|^2: gradient descent diverges at rates above 2 / curvature."""

    examples = 64

    def __init__(self, curvature):
        self.curvature = curvature

    def model(self):
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def batches(self, epoch, first_step, share):
        while True:
            yield torch.zeros(1)

    def loss(self, model, batch):
        return Outcome(self.curvature / 2 * model.weight.square().sum() + 1e-3, {}, 1)


@pytest.mark.parametrize("curvature", [0.5, 50.0, 5000.0])
def test_the_suggestion_follows_the_curvature(tmp_path, curvature):
    settings = config(
        tmp_path, optimizer=Optimizer(momentum=0.0, weight_decay=0.0), schedule=Schedule(rate=0.1, per_batch=64)
    )
    found = find_rate(Quadratic(curvature), settings, lowest=1e-7, highest=1e3)
    limit = 2 / curvature
    assert found.diverged
    assert limit / 10 < found.suggested < limit
    assert found.schedule_rate == pytest.approx(found.suggested * 64 / 16)
    assert found.losses[0] == pytest.approx(2 * curvature, rel=1e-2)
    assert not tmp_path.joinpath("log.jsonl").exists()


def test_the_command_suggests_a_rate_and_changes_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lambdanets.train.find_rate.STEPS", 12)
    out = tmp_path / "run"
    words = ["train", "debug", "--find-rate", "--device", "cpu", "--data.workers", "0", "--out", str(out)]
    assert main(words) == 0
    assert "Suggested peak learning rate" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["find_rate.json", "find_rate.svg"]
    found = json.loads((out / "find_rate.json").read_text())
    assert len(found["rates"]) == len(found["losses"]) > 3
    assert main(["train", "debug", "--find-rate", "--resume", "--out", str(out)]) == 2
    assert "--find-rate needs a new run" in capsys.readouterr().err
