"""Two streams in one step: the loss by hand, the ratio, the same step for any number of processes, exact resumes."""

import json
import math
import signal

import numpy as np
import pytest
import torch

from lambdanets.pseudo.config import CoTrainConfig, PseudoData
from lambdanets.pseudo.cotrain import CoTrain, labelled_part, pseudo_loss
from lambdanets.pseudo.files import KEY, label_path, read_labels, selected_path
from lambdanets.pseudo.label import LabelOptions
from lambdanets.pseudo.select import Selection, select
from lambdanets.pseudo.source import PseudoSource, spread
from lambdanets.train.loop import fit
from lambdanets.train.task import Share
from tests.data.helpers import write_tar
from tests.pseudo.made import label_all, make_files, make_shards, make_teacher
from tests.support.image_runs import folder_of_images, image_config, weights
from tests.train.weights import small_weights

NAMES = ("class0", "class1", "class2")


@pytest.fixture
def labels(tmp_path):
    """Labels in another order of classes than the labelled images have."""
    teacher = str(small_weights(tmp_path / "teacher.safetensors", ("class2", "class0", "class1"))[1])
    images = make_files(tmp_path / "unlabelled", 40, first=100)
    label_all(teacher, images, tmp_path / "labels", LabelOptions(soft=2, batch_size=8), unit=16)
    select(tmp_path / "labels", Selection(least=20))
    return tmp_path / "labels"


def config(images, out, labels, pseudo=None, **changes):
    base = image_config(images, out, **({"batch_size": 12} | changes))
    pseudo = {"path": labels, "ratio": 2.0} | (pseudo or {})
    return CoTrainConfig(**base.__dict__, pseudo=PseudoData(**pseudo))


def test_the_soft_loss_is_the_one_by_hand():
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, math.log(2)]])
    targets = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]])
    z = math.exp(1.0) + math.exp(2.0) + math.exp(0.5)
    first = -(0.7 * (1.0 - math.log(z)) + 0.2 * (2.0 - math.log(z)) + 0.1 * (0.5 - math.log(z)))
    second = -(0.5 * math.log(1 / 4) + 0.25 * math.log(1 / 4) + 0.25 * math.log(2 / 4))
    assert float(pseudo_loss(logits, targets, 0.1)) == pytest.approx(first + second, rel=1e-6)


def test_the_loss_of_a_step_is_the_one_by_hand(tmp_path, labels):
    images = folder_of_images(tmp_path / "images")
    task = CoTrain(config(images, tmp_path / "run", labels, {"soft": True, "weight": 0.5, "labelled_weight": 2.0}))

    class Fixed(torch.nn.Module):
        def forward(self, inputs):
            return logits

    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    soft = torch.tensor([[0.6, 0.4, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    batch = (torch.zeros(3, 3, 16, 16, dtype=torch.uint8), torch.tensor([0]), soft)
    outcome = task.loss(Fixed(), batch)
    log_z = math.log(math.exp(2) + 2)
    smoothed = -((0.9 + 0.1 / 3) * (2 - log_z) + 2 * (0.1 / 3) * (0 - log_z))
    other = math.log(math.e + 2)
    pseudo = -(0.6 * (0 - other) + 0.4 * (1 - other)) + math.log(3)
    assert float(outcome.loss) == pytest.approx((2.0 * smoothed + 0.5 * pseudo) / 3, rel=1e-6)
    assert outcome.examples == 3
    means = {name: float(value) / 3 for name, value in outcome.sums.items()}
    assert means["top1"] == 1.0
    assert means["labelled_loss"] == pytest.approx(smoothed, rel=1e-6)
    assert means["pseudo_loss"] == pytest.approx(pseudo / 2, rel=1e-6)


def test_what_is_not_kept_of_the_probabilities_is_spread_evenly():
    classes = torch.tensor([[4, 1], [0, 2]])
    values = torch.tensor([[0.5, 0.2], [0.9, 0.1]])
    found = spread(classes, values, 5)
    torch.testing.assert_close(found[0], torch.tensor([0.1, 0.2, 0.1, 0.1, 0.5]))
    torch.testing.assert_close(found[1], torch.tensor([0.9, 0.0, 0.1, 0.0, 0.0]))
    torch.testing.assert_close(found.sum(1), torch.ones(2))


@pytest.mark.parametrize("kind", ["list", "shards"])
def test_the_source_gives_the_images_and_labels_that_were_chosen(tmp_path, labels, kind):
    if kind == "shards":
        teacher = str(tmp_path / "teacher.safetensors")
        files = sorted((tmp_path / "unlabelled" / "somewhere").iterdir())
        for n in range(3):
            members = [(f"{p.stem}.jpg", p.read_bytes()) for p in files[16 * n : 16 * (n + 1)]]
            write_tar(tmp_path / "tars" / f"{n}.tar", members)
        labels = tmp_path / "from_tars"
        label_all(teacher, tmp_path / "tars", labels, LabelOptions(soft=2, batch_size=8))
        select(labels, Selection(least=20))
    source = PseudoSource(labels, NAMES)
    files = sorted((tmp_path / "unlabelled" / "somewhere").iterdir())
    place, seen = {"class2": 2, "class0": 0, "class1": 1}, set()
    names = ("class2", "class0", "class1")  # the teacher's order
    for index in range(len(source)):
        unit, position = int(source.unit[index]), int(source.position[index])
        theirs = read_labels(labels, unit)
        row = theirs.position.tolist().index(position)
        assert source.read(index) == files[16 * unit + position].read_bytes()
        assert source.labels[index] == place[names[theirs.label[row]]]
        assert source.targets(torch.tensor([index])).argmax() == source.labels[index]
        assert source.name(index)
        seen.add((unit, position))
    assert len(seen) == 40
    counts = np.bincount(source.labels, minlength=3)
    assert all(count == 0 or count >= 20 for count in counts)
    assert len(source) > 40  # a class was short, and its images repeated


@pytest.mark.parametrize("remainder", ["drop", "carry"])
def test_a_step_holds_both_kinds_at_the_ratio_for_any_number_of_processes(tmp_path, labels, remainder):
    images = folder_of_images(tmp_path / "images")
    one = CoTrain(config(images, tmp_path / "run", labels, {"soft": True, "epoch": "labelled"}))
    assert one.epoch_steps == 48 // 4
    whole = list(one.batches(1, 10, Share(0, 1, 12, 1, remainder)))
    assert len(whole) == 2
    pixels, mine, targets = whole[0]
    assert (len(pixels), len(mine), targets.shape) == (12, 4, (8, 3))
    parts = [CoTrain(one.config).batches(1, 10, Share(rank, 2, 3, 2, remainder)) for rank in range(2)]  # type: ignore[arg-type]
    for step in whole:
        pieces = [[next(part) for part in parts] for _ in range(2)]  # micro-batch after micro-batch
        flat = [piece for row in pieces for piece in row]
        assert torch.equal(torch.cat([p[0][:1] for p in flat] + [p[0][1:] for p in flat]), step[0])
        assert torch.equal(torch.cat([p[1] for p in flat]), step[1])
        assert torch.equal(torch.cat([p[2] for p in flat]), step[2])


def test_an_epoch_uses_all_images_of_both_kinds(tmp_path, labels):
    """The images that take more steps make the epoch; with carry none is left out."""
    images = folder_of_images(tmp_path / "images")
    share = Share(0, 1, 12, 1, "carry")
    for ratio, longer in ((0.5, "pseudo"), (5.0, "labelled")):
        task = CoTrain(config(images, tmp_path / "run", labels, {"ratio": ratio}, remainder="carry"))
        counts = {"labelled": len(task.indices), "pseudo": len(task.unlabelled)}
        each = {"labelled": round(12 / (1 + ratio)), "pseudo": 12 - round(12 / (1 + ratio))}
        steps = {name: counts[name] / each[name] for name in counts}
        assert task.describe()["epoch_of"] == longer == max(steps, key=steps.__getitem__)
        count = math.ceil(steps[longer])
        assert share.epochs(task.examples).first(1) == count == len(list(task.batches(0, 0, share)))
        for name in counts:
            seen = [
                int(i)
                for _, b in zip(range(count), task.stream(name, share).stream(0), strict=False)
                for i in b.indices
            ]
            assert len(set(seen)) == counts[name]


def test_the_streams_go_round_at_their_own_pace(tmp_path, labels):
    images = folder_of_images(tmp_path / "images")
    task = CoTrain(config(images, tmp_path / "run", labels, {"epoch": "labelled"}))
    pseudo, steps = len(task.unlabelled), task.epoch_steps
    seen: list[int] = []
    loader = task.stream("pseudo", share := Share(0, 1, 12, 1))
    for batch in loader.epoch(0):
        seen += batch.indices.tolist()
    assert len(set(seen)) == len(seen) == pseudo // 8 * 8  # once through, before any comes again
    first = [batch for epoch in range(2) for batch in task.batches(epoch, 0, share)]
    assert len(first) == 2 * steps
    later = list(task.batches(1, 3, share))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first[steps + 3 :], later, strict=True))
    assert CoTrain(config(images, tmp_path / "run", labels, {"epoch": "pseudo"})).epoch_steps == pseudo // 8


@pytest.mark.parametrize("workers", [0, 2])
def test_it_stops_and_resumes_to_the_last_bit(tmp_path, labels, workers):
    images = folder_of_images(tmp_path / "images")
    data = image_config(images, tmp_path).data.__class__(path=str(images), workers=workers)
    fit(CoTrain(c := config(images, tmp_path / "whole", labels, {"soft": True}, epochs=2.0)), c)
    first = config(images, tmp_path / "parts", labels, {"soft": True}, epochs=2.0, data=data)

    def stop(record):
        if record["event"] == "step" and record["step"] == 14:
            signal.raise_signal(signal.SIGTERM)

    assert fit(CoTrain(first), first, watch=stop).step == 14
    assert fit(CoTrain(first), first, resume=True).finished
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_goes_on_only_with_the_images_it_began_with(tmp_path, labels):
    images = folder_of_images(tmp_path / "images")
    c = config(images, tmp_path / "run", labels, epochs=0.1)
    fit(CoTrain(c), c)
    CoTrain(c)
    select(labels, Selection(threshold=0.0, least=25))
    with pytest.raises(ValueError, match="have changed since the run"):
        CoTrain(c)


def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path, labels):
    images = folder_of_images(tmp_path / "images")
    other = folder_of_images(tmp_path / "other", classes=2)
    with pytest.raises(
        ValueError, match=r"3 classes and the labelled images 2.*'class2' is not one of the student's classes"
    ):
        CoTrain(config(other, tmp_path / "run", labels))
    with pytest.raises(ValueError, match=r"at 1 to 2: batch_size and micro_batch must be multiples of 3"):
        CoTrain(config(images, tmp_path / "run", labels, batch_size=8))
    with pytest.raises(ValueError, match=r"a step needs \d+ labelled images"):
        CoTrain(config(images, tmp_path / "run", labels, batch_size=300))
    files = tmp_path / "unlabelled" / "somewhere"
    (files / "007.jpg").rename(files / "700.jpg")
    with pytest.raises(
        ValueError, match=r"since it was labelled \(the same number of images, but other names\): label"
    ):
        CoTrain(config(images, tmp_path / "run", labels))
    (files / "700.jpg").unlink()
    with pytest.raises(ValueError, match=r"since it was labelled \(40 images then, 39 now\): label it again"):
        CoTrain(config(images, tmp_path / "run", labels))
    with pytest.raises(ValueError, match="more than 0"):
        PseudoData(ratio=0)


def rewritten(path, digests=False, **changed):
    """Change columns of a file of labels, by default of one from before there were digests."""
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    with safe_open(str(path), framework="np") as file:
        about = json.loads(file.metadata()[KEY])
    if not digests:
        del about["digests"]
    columns = load_file(path)
    for name, change in changed.items():
        columns[name] = change(columns[name].copy())
    save_file(columns, path, {KEY: json.dumps(about)})


def put(value, *place):
    def change(column):
        column[place] = value
        return column

    return change


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"label": put(-1, 3)}, "label -1 is not one of 0 to 2"),
        ({"label": put(3, 3)}, "label 3 is not one of 0 to 2"),
        ({"label": lambda column: column.astype(np.int64)}, "label has the type int64"),
        ({"label": lambda column: column[:-1]}, "different lengths"),
        ({"position": put(99, 0)}, "position 99"),
        ({"position": put(1, 0)}, "an image has two labels"),
        ({"confidence": put(np.nan, 0)}, "confidences must be numbers from 0 to 1"),
        ({"confidence": put(1.5, 0)}, "confidences must be numbers from 0 to 1"),
        ({"classes": put(-1, 0, 1)}, "classes -1"),
        ({"classes": lambda column: column[:, [0, 0]]}, "has two probabilities"),
        ({"classes": lambda column: column[:, ::-1].copy()}, "not the most likely class"),
        ({"probabilities": put(np.inf, 0, 0)}, "probabilities must be numbers from 0 to 1"),
        ({"probabilities": put(0.9, 0, slice(None))}, "whose sum is more than 0 and at most 1"),
        ({"probabilities": lambda column: column[:, :1]}, "but labels.json has soft=2"),
    ],
)
def test_labels_that_cannot_be_are_refused(tmp_path, labels, changed, words):
    path = label_path(labels, 0)
    rewritten(path, **changed)
    with pytest.raises(ValueError, match=words):
        read_labels(labels, 0)
    use = (lambda: select(labels, Selection())) if "confidence" in changed else lambda: PseudoSource(labels, NAMES)
    with pytest.raises(ValueError, match=r"000000.safetensors is damaged"):
        use()


def test_contents_that_changed_are_refused_and_old_files_have_no_digests(tmp_path, labels):
    before = PseudoSource(labels, NAMES)
    for number in range(3):
        rewritten(label_path(labels, number))
        rewritten(selected_path(labels, number))
    assert PseudoSource(labels, NAMES).digest == before.digest
    select(labels, Selection(least=20))  # with digests again
    rewritten(selected_path(labels, 1), digests=True, repeats=put(7, 0))
    with pytest.raises(ValueError, match=r"000001.safetensors is damaged: its contents do not match their digests"):
        PseudoSource(labels, NAMES)
    rewritten(selected_path(labels, 1), row=put(1000, -1))
    with pytest.raises(ValueError, match="rows must be increasing numbers from 0 to 15"):
        PseudoSource(labels, NAMES)
    data = json.loads((labels / "labels.json").read_text())
    (labels / "labels.json").write_text(json.dumps(data | {"units": [3]}))
    with pytest.raises(ValueError, match=r"labels.json cannot be read: units\[0\] must be an object, got 3"):
        PseudoSource(labels, NAMES)


def test_shards_that_changed_are_named(tmp_path):
    teacher = make_teacher(tmp_path / "teacher.safetensors", names=NAMES)
    shards = make_shards(tmp_path / "shards", 3)
    label_all(teacher, shards, tmp_path / "labels")
    select(tmp_path / "labels", Selection())
    assert len(PseudoSource(tmp_path / "labels", NAMES))
    (shards / "shard-2.tar").rename(shards / "shard-7.tar")
    with pytest.raises(ValueError, match=r"since it was labelled \(shard 3 was 'shard-2.tar' and is 'shard-7.tar'\)"):
        PseudoSource(tmp_path / "labels", NAMES)
    (shards / "shard-7.tar").unlink()
    with pytest.raises(ValueError, match=r"\(shard 3, 'shard-2.tar', is missing\)"):
        PseudoSource(tmp_path / "labels", NAMES)


def test_hard_labels_have_no_soft_targets(tmp_path):
    teacher = make_teacher(tmp_path / "teacher.safetensors", names=NAMES)
    label_all(teacher, make_files(tmp_path / "files", 20), tmp_path / "hard", LabelOptions(batch_size=8))
    select(tmp_path / "hard", Selection())
    images = folder_of_images(tmp_path / "images")
    with pytest.raises(ValueError, match="hard labels only"):
        CoTrain(config(images, tmp_path / "run", tmp_path / "hard", {"soft": True}))
    task = CoTrain(config(images, tmp_path / "run", tmp_path / "hard"))
    assert next(task.batches(0, 0, Share(0, 1, 12, 1)))[2].dtype == torch.int64
    select(tmp_path / "hard", Selection(threshold=1.0))
    with pytest.raises(ValueError, match="no image above the threshold"):
        CoTrain(config(images, tmp_path / "run", tmp_path / "hard"))


@pytest.mark.parametrize(("images", "ratio", "labelled"), [(256, 1, 128), (256, 7, 32), (12, 0.5, 8), (3, 2, 1)])
def test_ratios(images, ratio, labelled):
    assert labelled_part(images, ratio) == labelled


def test_half_precision_on_a_cpu(tmp_path, labels):
    images = folder_of_images(tmp_path / "images")
    c = config(images, tmp_path / "run", labels, epochs=0.2, precision="bfloat16")
    assert fit(CoTrain(c), c).finished
