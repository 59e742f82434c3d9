"""Labels are the teacher's, and the same bytes however often labelling was killed and whoever did it."""

import random
import resource

import numpy as np
import pytest
import torch

from lambdanets.cli import main
from lambdanets.data.source import open_source
from lambdanets.files import locked
from lambdanets.models import Card, Preprocessing, save_weights
from lambdanets.pseudo.files import label_path, read_labels
from lambdanets.pseudo.label import LabelOptions, label
from lambdanets.pseudo.teacher import open_teachers
from lambdanets.pseudo.units import open_place
from lambdanets.train.inference.command import Using
from tests.data.helpers import samples, write_tar
from tests.pseudo.made import (
    OPTIONS,
    contents,
    killed,
    label_all,
    make_files,
    make_shards,
    make_teacher,
    write_made_labels,
)
from tests.train.weights import NAMES, SIZE, image_folder, scores_of, small_network


@pytest.fixture
def teacher(tmp_path):
    return make_teacher(tmp_path / "teacher.safetensors")


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path / "shards")


def test_labels_are_what_the_network_says(tmp_path, teacher):
    image_folder(tmp_path / "images", each=3)  # of the size that the network takes: nothing is resized
    done = label_all(teacher, tmp_path / "images", tmp_path / "out", unit=8)
    source, network = open_source(tmp_path / "images"), small_network()
    seen = 0
    for number in range(3):
        labels = read_labels(tmp_path / "out", number)
        assert labels.probabilities is not None
        assert labels.classes is not None
        for row in range(len(labels)):
            index = 8 * number + int(labels.position[row])
            expected = scores_of(network, source.path(index)).softmax(0)  # type: ignore[attr-defined]
            values, classes = expected.topk(3)
            assert labels.label[row] == classes[0]
            assert labels.confidence[row] == pytest.approx(float(values[0]), abs=1e-5)
            assert labels.classes[row].tolist() == classes.tolist()
            np.testing.assert_allclose(labels.probabilities[row].astype(float), values, atol=5e-4)
            seen += 1
    assert seen == done.images == len(source) == 21
    assert done.complete


@pytest.mark.parametrize("kind", ["shards", "list"])
def test_killed_at_random_moments_and_resumed_it_is_byte_identical(tmp_path, teacher, shards, kind):
    images = shards if kind == "shards" else make_files(tmp_path / "files", 75)
    label_all(teacher, images, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    generator = random.Random(kind)
    kills = moments = 0
    for attempt in range(3):
        out = tmp_path / f"parts-{attempt}"
        before: dict[str, bytes] = {}
        while killed(lambda out=out: label_all(teacher, images, out), moment := generator.randint(1, 25)):
            kills, moments = kills + 1, moments + moment
            now = {name: data for name, data in contents(out).items() if not name.endswith(".part")}
            assert before.items() <= now.items()  # what is finished stays
            assert now.items() <= whole.items()  # and is whole
            before = now
        label_all(teacher, images, out)  # what is left of killed processes is removed where work was left
        assert contents(out) == whole
    assert kills >= 5


def test_killed_at_every_moment_of_the_start(tmp_path, teacher, shards):
    label_all(teacher, shards, tmp_path / "whole")
    for moment in range(1, 8):
        assert killed(lambda: label_all(teacher, shards, tmp_path / "out"), moment)
    label_all(teacher, shards, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_it_goes_on_without_labelling_twice(tmp_path, teacher, shards):
    assert label_all(teacher, shards, tmp_path / "out").units == 5
    label_path(tmp_path / "out", 2).unlink()
    path = label_path(tmp_path / "out", 3)
    path.write_bytes(path.read_bytes()[:-7])  # a file that a failing disk has cut
    again = label_all(teacher, shards, tmp_path / "out")
    assert (again.units, again.skipped, again.images) == (2, 3, 22 + 23)


@pytest.mark.parametrize("workers", [0, 2])
def test_several_processes_give_the_result_of_one(tmp_path, teacher, shards, workers):
    label_all(teacher, shards, tmp_path / "one")
    for rank in (1, 0, 2):
        done = label_all(teacher, shards, tmp_path / "three", workers=workers, rank=rank, world=3)
        assert done.complete == (rank == 2)
        assert done.units == (1 if rank == 2 else 2)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_labels_in_use_by_another_process_are_left_as_they_are(tmp_path, teacher, shards, capsys):
    out = tmp_path / "out"
    command = ["pseudo", "label", teacher, str(shards), str(out), "--device", "cpu", "--workers", "0"]
    with locked(out):
        assert main(command) == 2
        assert f"{out} is in use by another process" in capsys.readouterr().err
        assert main(["pseudo", "select", str(out)]) == 2
        assert f"{out} is in use by another process" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert main(["pseudo", "select", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


def test_files_that_are_not_read_are_named(tmp_path, teacher, capsys):
    image_folder(tmp_path / "images", each=1)
    (tmp_path / "images" / NAMES[0] / "phone.heic").write_bytes(b"x")
    command = ["pseudo", "label", teacher, str(tmp_path / "images"), str(tmp_path / "out")]
    command += ["--device=cpu", "--workers=0"]
    assert main(command) == 0
    assert f"1 file was not read in {tmp_path / 'images'}: .heic (1)" in capsys.readouterr().err


def test_a_damaged_shard_is_named_and_the_others_are_kept(tmp_path, teacher, shards, capsys):
    label_all(teacher, shards, tmp_path / "whole", LabelOptions(batch_size=8))
    good = (shards / "shard-2.tar").read_bytes()
    (shards / "shard-2.tar").write_bytes(good[: len(good) // 2])
    (shards / "shard-4.tar").write_bytes(b"garbage" * 1000)
    last = write_tar(tmp_path / "keep.tar", samples(24, 400)).read_bytes()
    command = ["pseudo", "label", teacher, str(shards), str(tmp_path / "out"), "--device", "cpu", "--batch-size", "8"]
    assert main([*command, "--workers", "0"]) == 1
    said = capsys.readouterr()
    assert "not labelled: shard-2.tar:" in said.err.replace("\n", "")
    assert "damaged" in said.err
    assert "shard-4.tar" in said.err
    assert [label_path(tmp_path / "out", n).exists() for n in range(5)] == [True, True, False, True, False]
    assert main(["pseudo", "select", str(tmp_path / "out")]) == 2
    assert "--partial" in capsys.readouterr().err
    assert main(["pseudo", "select", str(tmp_path / "out"), "--partial"]) == 0
    assert "2 of 5 units have no labels" in (tmp_path / "out" / "report.html").read_text()
    (shards / "shard-2.tar").write_bytes(good)
    (shards / "shard-4.tar").write_bytes(last)
    assert main([*command, "--workers", "0"]) == 0
    whole = contents(tmp_path / "whole")
    assert {name: data for name, data in contents(tmp_path / "out").items() if name in whole} == whole


def test_unreadable_images_are_left_out_and_named(tmp_path, teacher):
    files = make_files(tmp_path / "files", 30)
    (files / "somewhere" / "003.jpg").write_bytes(b"garbage")
    picture = files / "somewhere" / "017.jpg"
    picture.write_bytes(picture.read_bytes()[:60])
    done = label_all(teacher, files, tmp_path / "out", LabelOptions(batch_size=8, max_broken=0.1), unit=10)
    assert (done.images, done.broken, done.complete) == (28, 2, True)
    labels = read_labels(tmp_path / "out", 0)
    assert labels.broken[0][0] == "somewhere/003.jpg"
    assert labels.position.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    strict = label_all(teacher, files, tmp_path / "strict", LabelOptions(batch_size=8, max_broken=0.05), unit=10)
    assert [name for name, _ in strict.failed] == ["images-0", "images-10"]
    assert "1 of 10 images" in strict.failed[0][1]
    assert not strict.complete
    assert label_path(tmp_path / "strict", 2).exists()


def test_another_teacher_or_another_setting_is_refused(tmp_path, teacher, shards):
    label_all(teacher, shards, tmp_path / "out")
    other = small_network()
    with torch.no_grad():
        other.get_classifier().bias.add_(1e-3)
    names = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
    path = save_weights(other, tmp_path / "other" / "teacher.safetensors", Card(Preprocessing(size=SIZE), names))
    with pytest.raises(
        ValueError, match=r"other images or settings: teacher 1 was '.*' and is '.*other/.* another folder"
    ):
        label_all(str(path), shards, tmp_path / "out")
    kept = (tmp_path / "teacher.safetensors").rename(tmp_path / "kept")
    path.rename(tmp_path / "teacher.safetensors")
    with pytest.raises(ValueError, match=r"other images or settings: teacher 1: weights was .* another folder"):
        label_all(teacher, shards, tmp_path / "out")
    kept.rename(teacher)
    with pytest.raises(ValueError, match="soft was 3 and is 0"):
        label_all(teacher, shards, tmp_path / "out", LabelOptions(batch_size=8))
    write_tar(shards / "shard-9.tar", samples(3, 900))
    with pytest.raises(ValueError, match=r"unit 6, 'shard-9\.tar', is new"):
        label_all(teacher, shards, tmp_path / "out")


def test_the_first_difference_is_named(tmp_path, teacher):
    files = make_files(tmp_path / "files", 30)
    label_all(teacher, files, tmp_path / "out")
    removed = (files / "somewhere" / "029.jpg").rename(tmp_path / "029.jpg")
    with pytest.raises(ValueError, match=r"unit 3 \(images-20\): images was 10 and is 9\. Use the same ones"):
        label_all(teacher, files, tmp_path / "out")
    removed.rename(files / "somewhere" / "030.jpg")
    with pytest.raises(ValueError, match="files were added, removed or renamed"):
        label_all(teacher, files, tmp_path / "out")
    (files / "somewhere" / "030.jpg").rename(files / "somewhere" / "029.jpg")
    with pytest.raises(ValueError, match="precision was 'float32' and is 'float64'"):  # and the weights' hash with it
        label(open_teachers(teacher, Using(device="cpu", precision="float64")), open_place(str(files), "train", 10),
              tmp_path / "out", OPTIONS)  # fmt: skip
    assert label_all(teacher, files, tmp_path / "out").skipped == 3


def test_a_folder_without_images_says_where_they_lie(tmp_path, teacher):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no images .* into the folder itself"):
        label_all(teacher, tmp_path / "empty", tmp_path / "out")
    for file in (make_files(tmp_path / "files", 4) / "somewhere").iterdir():
        file.rename(tmp_path / "empty" / file.name)
    assert label_all(teacher, tmp_path / "empty", tmp_path / "out").images == 4


def test_the_advice_about_broken_images_can_be_followed(tmp_path, teacher):
    files = make_files(tmp_path / "files", 30)
    broken = files / "somewhere" / "003.jpg"
    good = broken.read_bytes()
    broken.write_bytes(b"garbage")
    strict = label_all(teacher, files, tmp_path / "out", LabelOptions(batch_size=8))
    ((name, why),) = strict.failed
    assert name == "images-0"
    assert "Replace them with readable files" in why
    assert "--max-broken" in why
    allowed = label_all(teacher, files, tmp_path / "out", LabelOptions(batch_size=8, max_broken=0.5))
    assert (allowed.units, allowed.skipped, allowed.complete) == (1, 2, True)
    label_path(tmp_path / "out", 0).unlink()
    broken.write_bytes(good)
    mended = label_all(teacher, files, tmp_path / "out", LabelOptions(batch_size=8))
    assert (mended.images, mended.complete) == (10, True)


def test_the_advice_about_broken_images_in_a_shard_can_be_followed(tmp_path, teacher):
    shards, members = make_shards(tmp_path / "shards", 2), samples(10, 500)
    write_tar(shards / "shard-1.tar", [*members, ("bad.jpg", b"garbage")])
    ((name, why),) = label_all(teacher, shards, tmp_path / "out").failed
    assert name == "shard-1.tar"
    assert "Write the shard again without them" in why
    write_tar(shards / "shard-1.tar", members)
    assert label_all(teacher, shards, tmp_path / "out").complete


def test_before_a_unit_is_finished_settings_may_change(tmp_path, teacher, shards, capsys):
    command = ["pseudo", "label", teacher, str(shards), str(tmp_path / "out"), "--device", "cpu", "--workers", "0"]
    assert main([*command, "--guard", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]  # nothing else before all is ready
    assert killed(lambda: label_all(teacher, shards, tmp_path / "out"), 5)
    before = contents(tmp_path / "out")
    assert list(before) == ["labels.json"]
    label_all(teacher, shards, tmp_path / "out", other := LabelOptions(batch_size=16))
    label_all(teacher, shards, tmp_path / "new", other)
    assert contents(tmp_path / "out") == contents(tmp_path / "new")
    assert contents(tmp_path / "out")["labels.json"] != before["labels.json"]


def test_two_commands_do_not_mix_their_labels(tmp_path, teacher, shards):
    """The second begins while the first has no finished unit."""

    def second_begins(images, units):
        if not units and not (tmp_path / "begun").exists():
            (tmp_path / "begun").touch()
            assert killed(lambda: label_all(teacher, shards, tmp_path / "out", LabelOptions(batch_size=4)), 5)

    with pytest.raises(ValueError, match="another command with other settings"):
        label_all(teacher, shards, tmp_path / "out", LabelOptions(batch_size=2), progress=second_begins)
    assert not list((tmp_path / "out").glob("labels/*.safetensors"))


def test_a_full_disk_keeps_what_is_finished(tmp_path, teacher):
    """The kernel refuses to write more than so many bytes to a file: the third unit's is larger."""
    shards = make_shards(tmp_path / "shards", 2)
    write_tar(shards / "shard-2.tar", samples(60, 500))
    label_all(teacher, shards, tmp_path / "whole")
    sizes = [label_path(tmp_path / "whole", n).stat().st_size for n in range(3)]
    limit = (max(sizes[:2]) + sizes[2]) // 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written.*bytes free.*are kept"):
            label_all(teacher, shards, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    there = contents(tmp_path / "out")
    assert sorted(there) == ["labels.json", "labels/000000.safetensors", "labels/000001.safetensors"]
    again = label_all(teacher, shards, tmp_path / "out")
    assert (again.units, again.skipped) == (1, 2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_probabilities_that_are_not_finite_stop(tmp_path, shards):
    network = small_network()
    with torch.no_grad():
        network.get_classifier().weight.fill_(3e38)  # finite: weights that are not are refused when they are loaded
    path = save_weights(network, tmp_path / "bad.safetensors", Card(Preprocessing(size=SIZE)))
    with pytest.raises(ValueError, match="not finite with --precision float32: its weights are damaged"):
        label_all(str(path), shards, tmp_path / "out", OPTIONS)


def test_the_advice_about_precision_can_be_followed(tmp_path):
    """An image that only float16 cannot take: its colour times this weight is more than 65504."""
    network = small_network()
    with torch.no_grad():
        network.get_classifier().weight.mul_(1e6)
    teacher = str(save_weights(network, tmp_path / "large.safetensors", Card(Preprocessing(size=SIZE))))
    shards = make_shards(tmp_path / "shards", 2)

    def with_precision(precision, out):
        ensemble = open_teachers(teacher, Using(device="cpu", precision=precision))
        return label(ensemble, open_place(str(shards), "train"), tmp_path / out, OPTIONS)

    with pytest.raises(ValueError, match=r"not finite with --precision float16\. Run again with --precision float32"):
        with_precision("float16", "out")
    assert with_precision("float32", "out").complete
    (tmp_path / "some" / "labels").mkdir(parents=True)
    label_path(tmp_path / "some", 1).write_bytes(label_path(tmp_path / "out", 1).read_bytes())
    with pytest.raises(ValueError, match=r"float32 and another folder than .*some, where some units are"):
        with_precision("float16", "some")


def test_label_files_that_are_damaged_are_named(tmp_path):
    from lambdanets.pseudo.files import write_arrays

    write_made_labels(tmp_path, [[0, 1, 2]], [[0.5, 0.5, 0.5]], ("a", "b", "c"))
    path = label_path(tmp_path, 0)
    columns = {"position": np.zeros(3, np.int32), "label": np.zeros(3, np.int32), "confidence": np.zeros(2, np.float32)}
    write_arrays(path, columns, {"images": 3, "broken": [], "leaks": []})
    with pytest.raises(ValueError, match="different lengths"):
        read_labels(tmp_path, 0)
    write_arrays(path, {"other": np.zeros(3)}, {"images": 3, "broken": [], "leaks": []})
    with pytest.raises(ValueError, match="not a label file"):
        read_labels(tmp_path, 0)
