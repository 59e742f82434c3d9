"""Distillation with an online teacher: it sees the same augmented crop as the student, mixing included.

This is "consistent teaching" of Beyer et al., Knowledge distillation: a good teacher is patient and consistent, 2022.
Images need no labels. The teacher is part of the training step, so it runs under the same autocast and CUDA graph.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.data.batch_augment import Mixed
from lambdanets.data.source import Source, open_source
from lambdanets.data.transforms import normalize
from lambdanets.models.flops import paper_flops
from lambdanets.pseudo.config import DistillConfig
from lambdanets.pseudo.teacher import open_teachers
from lambdanets.train.classify import Classify
from lambdanets.train.inference.command import Using
from lambdanets.train.inference.evaluate import match_classes
from lambdanets.train.task import Outcome

BACKWARD = 2  # the backward pass costs about twice the forward pass


class TeacherClasses:
    """A source whose labels are numbers of the teacher's classes, or -1."""

    def __init__(self, source: Source, class_names: tuple[str, ...], labels: np.ndarray, note: str = "") -> None:
        self.source, self.class_names, self.labels = source, class_names, labels
        self.notes: tuple[str, ...] = (*getattr(source, "notes", ()), *filter(None, [note]))

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def read(self, index: int) -> bytes | np.ndarray:
        return self.source.read(index)


class Relabelled(Classify):
    """Classification whose images have labels of the teacher, or none."""

    config: DistillConfig
    keeps_unlabelled = True

    def __init__(self, config: DistillConfig, class_names: tuple[str, ...]) -> None:
        self.class_names, self.ignored = class_names, config.data.path if config.teacher.weight == 1 else None
        super().__init__(config)

    def open_images(self, where: str, split: str) -> Source:
        """Open images, with labels as numbers of the teacher's classes."""
        source = open_source(where, split=split)
        labels = np.asarray(source.labels)
        try:
            found, note = match_classes(tuple(source.class_names), self.class_names)
        except ValueError:
            if where != self.ignored or split != "train":
                raise
            found, note = [-1] * len(source.class_names), ""  # training ignores the labels
        return TeacherClasses(
            source, self.class_names, np.array([*found, -1])[labels], f"{where}: {note}" if note else ""
        )


class Distill(Relabelled):
    """Train a network on a teacher's probabilities for the crops of each batch."""

    def __init__(self, config: DistillConfig) -> None:
        self.online = config.teacher
        using = Using(device="cpu", precision=config.precision)
        self.ensemble = open_teachers(self.online.weights, using, self.online.class_names)
        for teacher in self.ensemble.teachers:
            if teacher.channels != config.data.channels:
                raise ValueError(
                    f"{teacher.what} takes images of {teacher.channels} channels, and data.channels is "
                    f"{config.data.channels}: they must be equal"
                )
        super().__init__(config, self.ensemble.class_names)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        images, labels_B, mixed, size = self.augmented(batch)
        targets_BC = self.targets(images)
        logits_BC = self.logits(model, images, size)
        temperature, weight = self.online.temperature, self.online.weight
        soft_B = temperature**2 * F.cross_entropy(logits_BC / temperature, targets_BC, reduction="none")
        agree = (logits_BC.detach().argmax(1) == targets_BC.argmax(1)).sum()
        sums = {"top1": agree, "teacher_loss": soft_B.detach().sum()}
        if weight == 1:
            return Outcome(soft_B.mean(), sums, len(labels_B))
        hard_B, known_B = self.label_loss(logits_BC, labels_B, mixed)
        part_B = (1 - weight) * known_B
        labelled = (known_B * hard_B).detach().sum() / known_B.sum().clamp(min=1e-6)
        return Outcome(
            ((1 - part_B) * soft_B + part_B * hard_B).mean(),
            {**sums, "labelled_loss": labelled * len(labels_B)},  # the log divides by all images
            len(labels_B),
        )

    def label_loss(self, logits_BC: Tensor, labels_B: Tensor, mixed: Mixed | None) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy with the labels [B], and the labelled fraction of each (mixed) image [B]."""

        def one(labels_B: Tensor) -> tuple[Tensor, Tensor]:
            loss_B = F.cross_entropy(
                logits_BC, labels_B.clamp(min=0), label_smoothing=self.config.label_smoothing, reduction="none"
            )
            known_B = (labels_B >= 0).to(loss_B.dtype)
            return loss_B * known_B, known_B

        loss_B, known_B = one(labels_B)
        if mixed is not None and self.config.augment.mixes:
            others_B, known_others_B = one(labels_B[mixed.partner_B])
            loss_B = mixed.weight * loss_B + (1 - mixed.weight) * others_B
            known_B = mixed.weight * known_B + (1 - mixed.weight) * known_others_B
        return loss_B / known_B.clamp(min=1e-6), known_B

    @torch.no_grad()
    def targets(self, images: Tensor) -> Tensor:
        """Return the teacher's probabilities [B, C], float32, for images with values from 0 to 255."""
        self.move_teachers(images.device)
        size = self.online.size
        if size is not None and images.shape[-2:] != (size, size):
            images = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
        dtype = torch.float64 if self.config.precision == "float64" else torch.float32
        total_BC: Tensor | None = None
        for teacher, order_C in zip(self.ensemble.teachers, self.ensemble.orders, strict=True):
            inputs = normalize(images, teacher.preprocessing, dtype).contiguous(memory_format=torch.channels_last)
            logits_BC = teacher.network(inputs).float()[:, order_C]
            mine_BC = (logits_BC / self.online.temperature).softmax(1)
            total_BC = mine_BC if total_BC is None else total_BC + mine_BC
        assert total_BC is not None
        return total_BC / len(self.ensemble.teachers)

    def move_teachers(self, device: torch.device) -> None:
        if self.ensemble.orders[0].device != device:
            self.ensemble.orders = [order.to(device) for order in self.ensemble.orders]
            for teacher in self.ensemble.teachers:
                teacher.network.to(device)
                if self.config.compile:
                    teacher.network.compile()

    @cached_property
    def teacher_share(self) -> float:
        """Share of the teacher in the floating-point operations of a training step."""
        channels, side = self.config.data.channels, self.online.size or self.size
        teachers = sum(paper_flops(t.network, (1, channels, side, side)).total for t in self.ensemble.teachers)
        student = (1 + BACKWARD) * paper_flops(self.model(), (1, channels, self.size, self.size)).total
        return teachers / (teachers + student)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "teacher": [teacher.what for teacher in self.ensemble.teachers],
            "teacher_share": self.teacher_share,
        }

    def notes(self) -> list[str]:
        return [
            *super().notes(),
            f"The teacher takes {self.teacher_share:.0%} of the floating-point operations of a step",
        ]

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"teacher": [teacher.weights for teacher in self.ensemble.teachers]}
