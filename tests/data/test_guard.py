"""Validation images among the others are found: the same file, and one that looks the same."""

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from lambdanets.cli import main
from lambdanets.data.guard import CONTENT_ONLY, hash_images
from lambdanets.data.source import open_source
from lambdanets.pseudo.files import read_labels
from lambdanets.pseudo.label import LabelOptions
from tests.data.helpers import encoded, samples, write_folder, write_tar
from tests.pseudo.made import label_all, make_teacher
from tests.support.documents import generate
from tests.support.scripts import script

guard_hashes = script("benchmarks/guard_hashes.py")

SIDE = (96, 80)


def picture(seed, size=SIDE):
    """Large shapes and small ones, the large ones stronger, as in photographs."""
    generator = np.random.default_rng(seed)
    total = np.zeros((size[1], size[0], 3))
    for cells in (3, 6, 12, 24):
        rough = Image.fromarray(generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += np.asarray(rough.resize(size, Image.Resampling.BICUBIC), float) / cells
    return Image.fromarray((total * 255 / total.max()).astype(np.uint8))


def jpeg(seed):
    return encoded(picture(seed), quality=90)


@pytest.fixture
def validation(tmp_path):
    for number in range(12):
        path = tmp_path / "guarded" / "ab"[number // 6] / f"{number % 6:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(5000 + number))
    return tmp_path / "guarded"


def opened(data):
    return Image.open(io.BytesIO(data))


def test_the_same_file_is_found_by_its_bytes(validation):
    hashes = hash_images((str(validation),), CONTENT_ONLY)
    assert len(hashes) == 12
    assert hashes.leak(jpeg(5007), None) == ("b/001.jpg", "the same file")
    assert hashes.leak(jpeg(5013), None) is None


@pytest.mark.parametrize("change", ["recompressed", "smaller", "brighter", "png"])
def test_one_that_looks_the_same_is_found(validation, change):
    hashes = hash_images((str(validation),), 6)
    for seed in range(5000, 5012):
        image = picture(seed)
        data = {
            "recompressed": lambda i: encoded(i, quality=40),
            "smaller": lambda i: encoded(i.resize((64, 53))),
            "brighter": lambda i: encoded(ImageEnhance.Brightness(i).enhance(0.9), quality=95),
            "png": lambda i: encoded(i, "PNG"),
        }[change](image)
        found = hashes.leak(data, opened(data))
        assert found is not None, seed
        assert found[0] == f"{'ab'[(seed - 5000) // 6]}/{(seed - 5000) % 6:03d}.jpg"
        assert "looks the same" in found[1]


def test_others_are_not(validation):
    hashes = hash_images((str(validation),), 6)
    others = [jpeg(seed) for seed in range(300)]
    assert sum(hashes.leak(data, opened(data)) is not None for data in others) == 0


def test_pixels_without_a_file(validation):
    hashes = hash_images((str(validation),), 6)
    pixels = np.asarray(picture(5003))
    assert hashes.leak(pixels, Image.fromarray(pixels)) is not None


def test_leaks_are_dropped_and_reported(tmp_path, validation, capsys):
    teacher = make_teacher(tmp_path / "teacher.safetensors")
    members = [(f"{i:05d}.jpg", jpeg(i)) for i in range(20)]
    members[4] = ("00004.jpg", jpeg(5002))  # a copy
    members[11] = ("00011.jpg", encoded(picture(5009), quality=50))  # recompressed
    write_tar(tmp_path / "shards" / "s.tar", members)
    command = ["pseudo", "label", teacher, str(tmp_path / "shards"), str(tmp_path / "out"), "--guard", str(validation)]
    assert main([*command, "--workers", "0", "--device", "cpu", "--batch-size", "8"]) == 0
    assert "2 leaks dropped" in capsys.readouterr().out
    labels = read_labels(tmp_path / "out", 0)
    assert labels.images == 20
    assert labels.position.tolist() == [i for i in range(20) if i not in (4, 11)]
    assert [(name, of) for name, of, _ in labels.leaks] == [("s.tar:00004", "a/002.jpg"), ("s.tar:00011", "b/003.jpg")]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "s.tar:00011" in page
    assert "looks the same" in page


def test_only_the_validation_part_is_guarded(tmp_path):
    data = tmp_path / "data"
    write_folder(data / "train", {"a": 3}, 0)
    write_folder(data / "val", {"a": 2}, 100)
    hashes = hash_images((str(data),), 0)
    assert [hashes.names[i] for i in range(len(hashes))] == ["val/a/000.jpg", "val/a/001.jpg"]


def test_without_the_library_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "imagehash", None)
    write_folder(tmp_path / "data", {"a": 2}, 0)
    with pytest.raises(ValueError, match="pip install imagehash"):
        hash_images((str(tmp_path / "data"),), 6)
    assert len(hash_images((str(tmp_path / "data"),), CONTENT_ONLY)) == 2


def test_a_unit_of_leaks_alone_is_an_empty_file(tmp_path, validation):
    teacher = make_teacher(tmp_path / "teacher.safetensors")
    write_tar(tmp_path / "shards" / "a.tar", [("0.jpg", jpeg(5001))])
    write_tar(tmp_path / "shards" / "b.tar", samples(4))
    options = LabelOptions(batch_size=8, guard=(str(validation),))
    done = label_all(teacher, tmp_path / "shards", tmp_path / "out", options)
    assert (done.images, done.leaks, done.complete) == (4, 1, True)


def test_the_benchmark_counts_what_is_found_again(tmp_path, validation):
    output = tmp_path / "guard-imagenette.json"
    options = guard_hashes.GuardHashes(str(validation), output, changed=5, different=9, distances=(0, 6, 64))
    assert options.run() == 0
    result = json.loads(output.read_text())
    assert (result["changed"], result["pairs"]) == (5, 36)
    found = {row["change"]: row["found"] for row in result["rows"]}
    assert all(shares == sorted(shares) and shares[-1] == 1 for shares in found.values())
    assert found["half the size"][1] == 1
    assert found["mirrored"][1] == 0
    assert result["taken_for_the_same"] == [0, 0, 36]
    text = generate.filled("<!-- bench:guard-imagenette -->\n<!-- /bench -->", tmp_path)
    assert "5 photographs with each change, 36 pairs of different photographs.\n" in text
    assert "| mirrored | 0.0% | 0.0% | 100.0% |\n" in text
    assert "| false matches among the pairs | 0 | 0 | 36 |\n" in text


def test_packing_leaves_out_guarded_images_and_names(tmp_path, validation, capsys):
    """A copy, a smaller copy in another format, and names by pattern and from a file."""
    pool = tmp_path / "pool"
    for number in range(8):
        path = pool / "cd"[number // 4] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    (pool / "c" / "copy.jpg").write_bytes(jpeg(5003))
    picture(5004).resize((72, 60)).save(pool / "d" / "smaller.png")
    (tmp_path / "names.txt").write_text("d/7.jpg\n\nc/1.*\n")
    words = ["data", "pack", str(pool), str(tmp_path / "shards"), "--guard", str(validation), "--side", "40"]
    assert main([*words, "--leave-out", "c/0.jpg", f"@{tmp_path / 'names.txt'}", "--quality", "95"]) == 0
    out = capsys.readouterr().out
    assert "train: 5 images in 1 shards" in out
    assert "3 images left out by their name" in out
    assert "c/copy.jpg is a copy of a/003.jpg: the same file" in out
    assert "d/smaller.png is a copy of a/004.jpg: it looks the same" in out
    packed = open_source(tmp_path / "shards")
    kept = {number: picture(number).resize((48, 40), Image.Resampling.LANCZOS) for number in (2, 3, 4, 5, 6)}
    for index in range(len(packed)):
        image = opened(packed.read(index)).convert("RGB")
        assert image.size == (48, 40)
        far = {n: np.abs(np.asarray(image, float) - np.asarray(one, float)).mean() for n, one in kept.items()}
        nearest = min(far, key=far.__getitem__)
        assert far[nearest] < 6
        assert packed.class_names[packed.labels[index]] == "cd"[nearest // 4]
        del kept[nearest]
    assert not kept


def test_packing_keeps_the_bytes_of_small_images(tmp_path):
    (tmp_path / "pool" / "c").mkdir(parents=True)
    (tmp_path / "pool" / "c" / "0.jpg").write_bytes(jpeg(1))
    assert main(["data", "pack", str(tmp_path / "pool"), str(tmp_path / "shards"), "--side", str(min(SIDE))]) == 0
    assert open_source(tmp_path / "shards").read(0) == jpeg(1)


def test_wrong_options_of_packing_are_refused(tmp_path, validation, capsys):
    for options, words in (
        (["--quality", "0"], "--quality must be between 1 and 95, got 0"),
        (["--side", "0"], "--side"),
        (["--leave-out", "@nowhere.txt"], "nowhere.txt"),
        (["--guard", str(tmp_path / "nothing")], "nothing"),
    ):
        assert main(["data", "pack", str(validation), str(tmp_path / "shards"), *options]) == 2
        assert words in capsys.readouterr().err
