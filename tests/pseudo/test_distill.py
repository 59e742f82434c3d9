"""Distillation: the loss by hand, the same crops for both networks, classes by name, exact resumes."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lambdanets.cli import main
from lambdanets.data.batch_augment import Mixed
from lambdanets.pseudo.config import DistillConfig, OnlineTeacher
from lambdanets.pseudo.distill import Distill
from lambdanets.report.page import write_report
from lambdanets.runs import read_config
from lambdanets.train.config import DataConfig
from lambdanets.train.inference.command import Using
from lambdanets.train.inference.evaluate import evaluate, find_images
from lambdanets.train.inference.trained import open_trained
from lambdanets.train.loop import fit
from lambdanets.train.task import Share
from tests.support.image_runs import EVERYTHING, folder_of_images, image_config, weights
from tests.train.weights import MEAN, STD, image_folder, small_weights

NAMES = ("class2", "class0", "class1", "none")  # the teacher's, in another order than the folders


@pytest.fixture
def teacher(tmp_path):
    return str(small_weights(tmp_path / "teacher.safetensors", NAMES)[1])


@pytest.fixture
def photos(tmp_path):
    """Images without class folders."""
    generator = np.random.default_rng(5)
    (tmp_path / "photos").mkdir()
    for number in range(30):
        pixels = generator.integers(0, 255, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def config(images, out, teacher, validation=None, online=None, **changes):
    data = DataConfig(path=str(images), workers=0, validation=None if validation is None else str(validation))
    base = image_config(images, out, **({"data": data, "label_smoothing": 0.0} | changes))
    return DistillConfig(**base.__dict__, teacher=OnlineTeacher(weights=teacher, **(online or {})))


class Fixed(torch.nn.Module):
    """A student with constant outputs that keeps its inputs."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.seen = logits, []

    def forward(self, inputs):
        self.seen.append(inputs)
        return self.logits


def teacher_logits(path, images, size=None):
    """By a separate path: the stored network on images in float64."""
    network = small_weights(path, NAMES)[0].double()
    images = images.double()
    if size is not None:
        images = torch.nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(values).double()[:, None, None] for values in (MEAN, STD))
    with torch.no_grad():
        return network((images / 255 - mean) / std).numpy()


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.mark.parametrize(("temperature", "size"), [(1.0, None), (3.0, 24)])
def test_the_loss_is_the_one_by_hand(tmp_path, teacher, temperature, size):
    images = folder_of_images(tmp_path / "images")
    online = {"temperature": temperature, "size": size}
    task = Distill(config(images, tmp_path / "run", teacher, online=online, precision="float64"))
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    logits = torch.randn(3, 4)
    outcome = task.loss(Fixed(logits), (pixels, torch.tensor([0, 1, 2])))
    targets = softmax(teacher_logits(tmp_path / "other.safetensors", pixels, size) / temperature)
    student = np.log(softmax(logits.double().numpy() / temperature))
    assert float(outcome.loss) == pytest.approx(-(targets * student).sum(1).mean() * temperature**2, rel=1e-5)
    assert float(outcome.sums["top1"]) == (targets.argmax(1) == logits.numpy().argmax(1)).sum()
    assert outcome.examples == 3


def test_labels_get_the_rest_of_the_weight(tmp_path, teacher):
    images = folder_of_images(tmp_path / "images")
    settings = {"online": {"weight": 0.75}, "label_smoothing": 0.1}
    task = Distill(config(images, tmp_path / "run", teacher, **settings))
    pixels, logits = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8), torch.randn(3, 4)
    found = task.loss(Fixed(logits), (pixels, torch.tensor([1, -1, 3])))
    targets, log = softmax(teacher_logits(tmp_path / "other.safetensors", pixels)), np.log(softmax(logits.numpy()))
    soft = -(targets * log).sum(1)
    hard = [-(0.9 * log[i, label] + 0.1 * log[i].mean()) for i, label in ((0, 1), (2, 3))]
    wanted = (0.75 * soft[0] + 0.25 * hard[0] + soft[1] + 0.75 * soft[2] + 0.25 * hard[1]) / 3
    assert float(found.loss) == pytest.approx(wanted, rel=1e-5)
    assert float(found.sums["labelled_loss"]) / 3 == pytest.approx(sum(hard) / 2, rel=1e-5)


def test_teachers_are_averaged_in_the_order_of_the_first(tmp_path, teacher):
    images = folder_of_images(tmp_path / "images")
    other = str(small_weights(tmp_path / "second.safetensors", NAMES[::-1])[1])
    task = Distill(config(images, tmp_path / "run", f"{teacher},{other}", precision="float64"))
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    one = softmax(teacher_logits(tmp_path / "third.safetensors", pixels))
    np.testing.assert_allclose(task.targets(pixels), (one + one[:, ::-1]) / 2, rtol=1e-5)


def test_a_mixed_image_has_as_much_label_as_labelled_pixels(tmp_path, teacher):
    images = folder_of_images(tmp_path / "images")
    task = Distill(config(images, tmp_path / "run", teacher, augment=EVERYTHING))
    logits, own = torch.randn(4, 4), torch.tensor(0.7)
    mixed = Mixed(torch.empty(0), torch.tensor([1, 2, 3, 0]), own)
    loss, known = task.label_loss(logits, torch.tensor([1, 2, -1, -1]), mixed)
    log = np.log(softmax(logits.numpy()))
    np.testing.assert_allclose(known, [1.0, 0.7, 0.0, 0.3], rtol=1e-6)
    by_hand = [-0.7 * log[0, 1] - 0.3 * log[0, 2], -log[1, 2], 0.0, -log[3, 1]]
    np.testing.assert_allclose(loss, by_hand, rtol=1e-5)


@pytest.mark.parametrize("cache", ["none", "device"])
def test_teacher_and_student_see_the_same_mixed_crops(tmp_path, teacher, cache):
    """And images that are mixed share their labels as they share their pixels."""
    images = folder_of_images(tmp_path / "images")
    data = DataConfig(path=str(images), workers=0, cache=cache, mean=MEAN, std=STD)
    online = {"weight": 0.5}
    task = Distill(config(images, tmp_path / "run", teacher, online=online, data=data, augment=EVERYTHING))
    seen = []
    task.ensemble.teachers[0].network.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    share = Share(0, 1, 8, 1)
    batch = next(task.batches(0, 0, share))
    student = Fixed(torch.randn(8, 4))
    found = task.loss(student, batch)
    torch.testing.assert_close(seen[0], student.seen[0])
    mixed = task.augmented(batch)[2]
    assert mixed is not None
    assert 0 < float(mixed.weight) < 1
    labels, log, own = batch[1], np.log(softmax(student.logits.numpy())), float(mixed.weight)
    hard = [-own * log[i, labels[i]] - (1 - own) * log[i, labels[mixed.partner_B[i]]] for i in range(8)]
    assert float(found.sums["labelled_loss"]) == pytest.approx(sum(hard), rel=1e-4)


def test_classes_are_the_teachers(tmp_path, teacher, photos):
    images = folder_of_images(tmp_path / "images")
    task = Distill(config(photos, tmp_path / "run", teacher, validation=images))
    assert len(task.indices) == 30
    assert set(task.source.labels) == {-1}
    assert task.model().num_classes == 4
    source, _ = task.parts["validation"]
    for index in range(len(source)):
        assert source.name(index).startswith(f"val/{NAMES[source.labels[index]]}")
    both = Distill(config(images, tmp_path / "run", teacher, online={"weight": 0.5}))
    names = [both.source.name(int(i)).split("/")[1] for i in both.indices]
    assert names == [NAMES[label] for label in both.source.labels[both.indices]]


def test_labels_of_other_classes_are_ignored_only_without_a_weight(tmp_path, teacher):
    others = tmp_path / "others"
    image_folder(others, ("ant", "bee"), each=6)
    images = folder_of_images(tmp_path / "images")
    task = Distill(config(others, tmp_path / "run", teacher, validation=images))
    assert len(task.indices) == 12
    with pytest.raises(ValueError, match="'ant'"):
        Distill(config(others, tmp_path / "run", teacher, validation=images, online={"weight": 0.5}))
    with pytest.raises(ValueError, match="'ant'"):
        Distill(config(images, tmp_path / "run", teacher, validation=others))


def test_labels_that_are_not_matched_by_name_are_told(tmp_path, teacher):
    four, two = tmp_path / "four", tmp_path / "two"
    image_folder(four, ("ant", "bee", "cow", "dog"), each=6)
    task = Distill(config(four, tmp_path / "run", teacher))
    assert [note for note in task.notes() if "by their order" in note and "'ant'" in note and "four" in note]
    image_folder(two, NAMES[:2], each=6)
    assert len(Distill(config(two, tmp_path / "run", teacher)).notes()) == 1


def test_validation_images_of_other_classes_are_refused(tmp_path, teacher):
    for split in ("train", "val"):
        image_folder(tmp_path / "others" / split, ("ant", "bee"), each=6)
    with pytest.raises(ValueError, match="'ant'"):
        Distill(config(tmp_path / "others", tmp_path / "run", teacher))


@pytest.mark.parametrize("labelled", [False, True])
def test_a_run_is_evaluated_without_its_teacher(tmp_path, teacher, photos, labelled):
    images = folder_of_images(tmp_path / "images")
    c = config(images / "train" if labelled else photos, tmp_path / "run", teacher, None if labelled else images)
    expected = fit(Distill(c), c).scores["ema"]["held_out" if labelled else "validation"]
    (tmp_path / "teacher.safetensors").unlink()
    found = evaluate(open_trained(str(c.out), Using(device="cpu")), find_images(str(c.out)))
    measured = {"examples": found.examples, "top1": found.top1, "loss": found.loss}
    assert measured == pytest.approx({name: expected[name] for name in measured}, rel=1e-5)


def test_a_run_on_photos_learns_resumes_exactly_and_keeps_its_teacher(tmp_path, teacher, photos):
    images = folder_of_images(tmp_path / "images")
    whole, parts = (config(photos, tmp_path / name, teacher, images, augment=EVERYTHING) for name in ("a", "b"))
    before = (tmp_path / "teacher.safetensors").read_bytes()
    task = Distill(whole)
    start = {name: tensor.clone() for name, tensor in task.ensemble.teachers[0].network.state_dict().items()}
    fit(task, whole)
    end = task.ensemble.teachers[0].network.state_dict()
    assert all(torch.equal(start[name], end[name]) for name in start)
    assert all(p.grad is None for p in task.ensemble.teachers[0].network.parameters())

    def stop(record):
        if record["event"] == "step" and record["step"] == 6:
            signal.raise_signal(signal.SIGTERM)

    assert not fit(Distill(parts), parts, watch=stop).finished
    again = replace(read_config(tmp_path / "b", "train"), out=tmp_path / "b")
    assert fit(again.make_task(), again, resume=True).finished
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "teacher.safetensors").read_bytes() == before


def test_another_teacher_is_another_run(tmp_path, teacher, photos):
    images = folder_of_images(tmp_path / "images")
    c = config(photos, tmp_path / "run", teacher, images, epochs=0.5)
    fit(Distill(c), c)
    small_weights(tmp_path / "teacher.safetensors", NAMES, heads=4)
    with pytest.raises(ValueError, match=r"the weights of its teacher changed: undo this"):
        fit(Distill(c), c, resume=True)


def test_what_does_not_fit_is_refused(tmp_path, teacher, photos):
    grey = str(small_weights(tmp_path / "grey.safetensors", NAMES, in_chans=1)[1])
    with pytest.raises(ValueError, match=r"1 channels, and data.channels is 3"):
        Distill(config(photos, tmp_path / "run", grey))
    with pytest.raises(ValueError, match=r"pass --data.validation"):
        Distill(config(photos, tmp_path / "run", teacher))
    with pytest.raises(ValueError, match=r"teacher.temperature .*0"):
        OnlineTeacher(temperature=0.0)
    with pytest.raises(ValueError, match=r"teacher.weight .*2"):
        OnlineTeacher(weight=2.0)


def test_the_log_says_what_the_teacher_costs(tmp_path, teacher, photos):
    images = folder_of_images(tmp_path / "images")
    small, large = (Distill(config(photos, tmp_path / "run", teacher, images, online={"size": s})) for s in (8, 64))
    assert 0 < small.teacher_share < large.teacher_share < 1
    assert large.describe()["teacher_share"] == large.teacher_share
    assert any(f"{large.teacher_share:.0%} of the floating-point" in note for note in large.notes())


def test_a_run_is_reported_and_used(tmp_path, teacher, photos, capsys):
    images = folder_of_images(tmp_path / "images")
    c = config(photos, tmp_path / "run", teacher, images, epochs=2.0)
    assert fit(Distill(c), c).finished
    assert "training, against the teacher" in write_report(tmp_path / "run").read_text()
    assert main(["predict", str(tmp_path / "run"), str(photos / "0.png"), "--json"]) == 0
    assert {one["class"] for one in json.loads(capsys.readouterr().out)["classes"]} <= set(NAMES)
