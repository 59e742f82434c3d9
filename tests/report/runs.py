"""Run folders in the schema that training writes, without training."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lambdanets.models.pretrained import KEY

HOSTILE = '<script>document.title="owned"</script>'


def write_run(
    folder: Path,
    names: Sequence[str] = tuple("0123456789"),
    *,
    examples: int = 400,
    wrong: float = 0.1,
    steps: int = 60,
    extra: Sequence[dict[str, Any]] = (),
    end: bool = True,
    data: str = "mnist",
) -> Path:
    """A run of `steps` logged steps whose predictions are wrong for a share of the examples."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    config = {
        "model": {"name": "resnet26", "placement": "CCLL", "image_size": 28, "options": ["scope=7"]},
        "data": {"path": data},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "epochs": 6,
        "label_smoothing": 0.1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    records: list[dict[str, Any]] = [
        {
            "event": "start",
            "time": 0.0,
            "config": config,
            "parameters": 1_234_567,
            "examples": 4000,
            "note": "Batch norm uses micro-batches of 8",
            "machine": {"cpu": "A chip", "cores": 2},
            "versions": {"torch": "2.11"},
        }
    ]
    for i in range(1, steps + 1):
        top1 = 1 - math.exp(-3 * i / steps)
        records.append(
            {
                "event": "step",
                "time": 2.0 * i,
                "step": 10 * i,
                "epoch": i // 10,
                "loss": 2.3 * math.exp(-3 * i / steps) + 0.05 * (i % 3),
                "top1": top1,
                "lr": 0.1 * (1 + math.cos(math.pi * i / steps)) / 2,
                "grad_norm": 1.0,
                "examples_per_second": 300.0 + i % 7,
                "data_wait": 0.02,
            }
        )
        if i % 10 == 0:
            for weights, bonus in (("ema", 0.02), ("raw", 0.0)):
                records.append(
                    {
                        "event": "evaluation",
                        "time": 2.0 * i,
                        "step": 10 * i,
                        "epoch": i // 10,
                        "weights": weights,
                        "split": "validation",
                        "loss": 2.3 * math.exp(-3 * i / steps),
                        "top1": min(1.0, top1 + bonus),
                        "top5": 1.0,
                        "examples": examples,
                    }
                )
    records += [{"time": 2.0 * steps, **record} for record in extra]
    if end:
        records.append({"event": "end", "time": 2.0 * steps})
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    classes = len(names)
    labels = torch.arange(examples) % classes
    answers = labels.clone()
    mistaken = torch.rand(examples, generator=generator) < wrong
    shift = torch.randint(1, max(classes, 2), (examples,), generator=generator)
    answers[mistaken] = (labels + shift.clamp_max(3))[mistaken] % classes
    logits = torch.randn(examples, classes, generator=generator)
    logits[torch.arange(examples), answers] += 8
    predictions = {"logits": logits.half(), "labels": labels, "indices": torch.arange(examples)}
    save_file(predictions, folder / "predictions.safetensors")

    tables = {
        f"layer{stage}.{block}.spatial.positions.table": torch.randn(23, 23, 16, generator=generator)
        for stage in (3, 4)
        for block in (0, 1)
    }
    save_file(tables, folder / "start.safetensors")
    y, x = torch.meshgrid(torch.linspace(-2, 2, 23), torch.linspace(-2, 2, 23), indexing="ij")
    moved = {name: 0.4 * table + torch.exp(-(y**2) - x**2)[..., None] for name, table in tables.items()}
    ours = {"name": "resnet26", "arguments": {}, "class_names": list(names)}
    save_file(moved, folder / "weights.safetensors", metadata={KEY: json.dumps(ours)})
    return folder
