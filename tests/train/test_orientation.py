"""Photographs stored in any EXIF orientation train, score and label exactly as the upright ones do."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from lambdanets.data.augment import Augment
from lambdanets.models.pretrained import KEY
from lambdanets.pseudo.config import CoTrainConfig, PseudoData
from lambdanets.pseudo.cotrain import CoTrain
from lambdanets.pseudo.files import read_labels
from lambdanets.pseudo.select import Selection, select
from lambdanets.recipes import debug
from lambdanets.train.classify import Classify
from lambdanets.train.config import DataConfig, TrainConfig
from lambdanets.train.loop import fit
from tests.data.helpers import photographed, picture
from tests.pseudo.made import label_all
from tests.train.weights import NAMES, small_weights

CLASSES = NAMES[:2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same scenes, once upright and once as cameras store them; and the stored pixels without EXIF data."""
    root = tmp_path_factory.mktemp("images")
    for number in range(32):
        scene = picture(number, (24, 17))
        data = photographed(scene, 2 + number % 7)
        name = Path("val" if number % 4 == 3 else "train", CLASSES[number % 2], f"{number:02d}.png")
        for kind in ("upright", "photos", "stored"):
            (root / kind / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "photos" / name).write_bytes(data)
        scene.save(root / "upright" / name)
        Image.fromarray(np.asarray(Image.open(root / "photos" / name))).save(root / "stored" / name)
    return {kind: root / kind for kind in ("upright", "photos", "stored")}


def config(images: Path, out: Path, turn: bool = True) -> TrainConfig:
    model = replace(debug().model, image_size=16, options=("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3"))
    data = DataConfig(path=str(images), exif_orientation=turn, workers=0)
    augment = Augment(crop_scale=(0.3, 0.9), randaugment_layers=1)
    return replace(
        debug(), model=model, data=data, augment=augment, out=out, device="cpu", epochs=1.0, batch_size=8, micro_batch=4
    )


def trained(task: Classify, run: TrainConfig) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights and the scores of a run."""
    result = fit(task, run)
    assert result.finished
    return load_file(str(run.out / "weights.safetensors")), result.scores


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("turn", "twin"), [(True, "upright"), (False, "stored")])
def test_training_and_its_evaluation(folders, tmp_path: Path, turn: bool, twin: str):
    runs = {kind: config(folders[kind], tmp_path / kind, turn) for kind in ("photos", twin)}
    (photos, scores), (expected, wanted) = (trained(Classify(run), run) for run in runs.values())
    assert same(photos, expected)
    assert scores == wanted
    with safe_open(str(tmp_path / "photos" / "weights.safetensors"), "pt") as file:
        assert json.loads(file.metadata()[KEY])["preprocessing"]["exif_orientation"] is turn


def test_the_two_orientations_differ(folders, tmp_path: Path):
    """Otherwise the test above would show nothing."""
    runs = [config(folders["photos"], tmp_path / str(turn), turn) for turn in (True, False)]
    (one, _), (other, _) = (trained(Classify(run), run) for run in runs)
    assert not same(one, other)


def test_labels_of_a_teacher_and_a_student_of_them(folders, tmp_path: Path):
    teacher = str(small_weights(tmp_path / "teacher.safetensors", CLASSES)[1])
    labels, students = {}, {}
    for kind in ("upright", "photos"):
        images, out = folders[kind] / "train", tmp_path / kind
        label_all(teacher, images, out / "labels", unit=100)
        labels[kind] = read_labels(out / "labels", 0)
        select(out / "labels", Selection(least=1))
        run = config(folders[kind], out / "run")
        run = CoTrainConfig(**run.__dict__, pseudo=PseudoData(path=out / "labels", ratio=1.0))
        students[kind], _ = trained(CoTrain(run), run)
    assert np.array_equal(labels["photos"].probabilities, labels["upright"].probabilities)
    assert len(np.unique(labels["photos"].probabilities)) > 20
    assert same(students["photos"], students["upright"])
