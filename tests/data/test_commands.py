"""`lambdanets data`: what it writes, lists and measures."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from lambdanets.cli import main
from lambdanets.data.source import open_source
from tests.data.helpers import encoded, jpeg, picture, samples, write_folder, write_tar


def two_splits(folder: Path) -> Path:
    write_folder(folder / "train", {"ant": 5, "bee": 8})
    write_folder(folder / "val", {"ant": 2, "bee": 1}, first=100)
    return folder


def test_pack_keeps_bytes_and_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    two_splits(tmp_path / "set")
    (tmp_path / "set" / "train" / "bee" / "999.jpg").write_bytes(b"garbage")
    assert main(["data", "pack", str(tmp_path / "set"), str(tmp_path / "shards"), "--images-per-shard", "4"]) == 0
    out = capsys.readouterr().out
    assert "train: 13 images in 4 shards" in out
    assert "train/bee/999.jpg: not a readable" in out
    for split in ("train", "validation"):
        folder, packed = open_source(tmp_path / "set", split=split), open_source(tmp_path / "shards", split=split)
        assert packed.class_names == ("ant", "bee")
        content = sorted((folder.read(i), folder.labels[i]) for i in range(len(folder)) if folder.read(i) != b"garbage")
        assert sorted((packed.read(i), packed.labels[i]) for i in range(len(packed))) == content
    labels = open_source(tmp_path / "shards").labels
    assert np.any(labels[:-1] > labels[1:])  # mixed
    assert main(["data", "pack", str(tmp_path / "set"), str(tmp_path / "shards")]) == 2
    assert "already contains shards" in capsys.readouterr().err


def test_packing_twice_gives_the_same_files(tmp_path: Path):
    two_splits(tmp_path / "set")
    for name in ("one", "two"):
        main(["data", "pack", str(tmp_path / "set"), str(tmp_path / name)])
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert set(one) == {"train-00000.tar", "val-00000.tar", "classes.txt"}


def test_webdataset_reads_what_pack_writes(tmp_path: Path):
    two_splits(tmp_path / "set")
    main(["data", "pack", str(tmp_path / "set"), str(tmp_path / "shards")])
    stream = webdataset.WebDataset(str(tmp_path / "shards" / "val-00000.tar"), shardshuffle=False).decode("pil")  # type: ignore[attr-defined]
    found = list(stream.to_tuple("jpg", "cls"))
    assert len(found) == 3
    assert sorted(label for _, label in found) == [0, 0, 1]
    assert found[0][0].size == (40, 32)


def test_the_digits_pack_as_png(tmp_path: Path):
    main(["data", "pack", "mnist", str(tmp_path / "shards"), "--images-per-shard", "3000"])
    with tarfile.open(tmp_path / "shards" / "val-00000.tar") as tar:
        assert sum(name.endswith(".png") for name in tar.getnames()) == 1000
    assert np.bincount(open_source(tmp_path / "shards").labels).tolist() == [400] * 10


def test_check_finds_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = two_splits(tmp_path / "set")
    for name, size in {"wide": (40, 32), "tall": (32, 40)}.items():  # the same bytes in another shape are no copies
        (folder / "train" / "ant" / f"{name}.png").write_bytes(encoded(Image.new("RGB", size, (9, 9, 9)), "PNG"))
    assert main(["data", "check", str(folder)]) == 0
    assert capsys.readouterr().out == "18 images (train 15, validation 3) in 2 classes\n"
    (folder / "train" / "ant" / "bad.jpg").write_bytes(jpeg(0)[:300])
    (folder / "train" / "bee" / "twice.jpg").write_bytes(jpeg(0))  # ant/000, with another label
    pixels = encoded(picture(50), "PNG")
    (folder / "train" / "bee" / "x.png").write_bytes(pixels)
    (folder / "val" / "bee" / "x.webp").write_bytes(encoded(picture(50), "WEBP", lossless=True))
    (folder / "train" / "none").mkdir()
    assert main(["data", "check", str(folder), "--json", str(tmp_path / "found.json")]) == 1
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["name"] for one in found["unreadable"]] == ["train: train/ant/bad.jpg"]
    assert [[place["name"] for place in group] for group in found["duplicates"]] == [
        ["train/ant/000.jpg", "train/bee/twice.jpg"]
    ]
    assert [[place["name"] for place in group] for group in found["leaked"]] == [["train/bee/x.png", "val/bee/x.webp"]]
    assert found["empty_classes"] == ["none"]
    for words in ("1 unreadable", "1 in more than one split", "1 duplicates with different labels", "none"):
        assert words in out


def test_speed_measures_all_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(tmp_path / "set", {"a": 6, "b": 6})
    options = ["--image-size", "16", "--rounds", "1", "--randaugment-layers", "1", "--json", str(tmp_path / "s.json")]
    options += ["--device", "cpu"]
    assert main(["data", "speed", str(tmp_path / "set"), *options]) == 0
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "decoding alone",
        "torchvision, normalized there",
        "torchvision, uint8",
        "lambdanets",
        "lambdanets, cache in memory",
        "lambdanets, kept on cpu",
    ]
    assert all(row["per_core"] > 0 for row in rows)
    assert [row["together"] is not None for row in rows] == [False] * 5 + [True]
    assert "lambdanets, kept on cpu" in capsys.readouterr().out


def test_a_wrong_place_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "check", str(tmp_path / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_check_tells_of_rare_and_missing_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(tmp_path / "set" / "train", {"ant": 10, "bee": 1, "cat": 2, "dog": 0})
    write_folder(tmp_path / "set" / "val", {"ant": 2, "bee": 1, "dog": 0}, first=100)
    (tmp_path / "set" / "train" / "cat" / "phone.heic").write_bytes(b"x")
    found = tmp_path / "found.json"
    assert main(["data", "check", str(tmp_path / "set"), "--json", str(found)]) == 0
    out = capsys.readouterr().out
    assert f"1 file was not read in {tmp_path / 'set' / 'train'}: .heic (1). Convert them" in out
    assert "1 classes with only one training image:\n  bee\n" in out
    assert "1 classes without images in a split:\n  validation: cat\n" in out
    assert "classes are imbalanced: 1 training images of bee, 10 of ant" in out
    data = json.loads(found.read_text())
    assert data["single_classes"] == ["bee"]
    assert data["missing_classes"] == [["validation", "cat"]]
    assert data["empty_classes"] == ["dog"]
    assert data["class_sizes"] == [["ant", 10], ["cat", 2], ["bee", 1], ["dog", 0]]


def test_check_tells_of_images_without_a_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_tar(tmp_path / "train-0.tar", [*samples(4), ("x.jpg", jpeg(9))])
    assert main(["data", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 of 5 train images has no label and is not used, the first is train-0.tar:x\n")


def test_pack_names_files_that_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(tmp_path / "set", {"a": 2})
    (tmp_path / "set" / "a" / "phone.heic").write_bytes(b"x")
    assert main(["data", "pack", str(tmp_path / "set"), str(tmp_path / "shards")]) == 0
    assert capsys.readouterr().out.startswith(f"1 file was not read in {tmp_path / 'set'}: .heic (1)")


def test_check_says_nothing_of_even_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "check", str(two_splits(tmp_path / "set"))]) == 0
    assert "class" not in capsys.readouterr().out.partition("\n")[2]


def test_every_format_is_packed_under_its_name(tmp_path: Path):
    (tmp_path / "set" / "a").mkdir(parents=True)
    image = picture(0)
    for number, format in enumerate(("GIF", "BMP", "WEBP", "PNG", "JPEG")):
        (tmp_path / "set" / "a" / f"{number}.jpg").write_bytes(encoded(image, format))
    several = encoded(image, "MPO", save_all=True, append_images=[image])  # as some telephones write it
    (tmp_path / "set" / "a" / "5.jpg").write_bytes(several)
    assert main(["data", "pack", str(tmp_path / "set"), str(tmp_path / "shards")]) == 0
    with tarfile.open(tmp_path / "shards" / "train-00000.tar") as tar:
        suffixes = sorted(Path(name).suffix for name in tar.getnames() if not name.endswith(".cls"))
    assert suffixes == [".bmp", ".gif", ".jpg", ".jpg", ".png", ".webp"]
    assert len(open_source(tmp_path / "shards")) == 6


def test_check_of_a_list_without_training_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(tmp_path / "set", {"ant": 1, "bee": 3})
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name},val" for path in sorted((tmp_path / "set").rglob("*.*"))]
    (tmp_path / "list.csv").write_text("\n".join(["file,label,split", *rows]) + "\n")
    assert main(["data", "check", str(tmp_path / "list.csv")]) == 0
    assert "1 classes with only one validation image:\n  ant\n" in capsys.readouterr().out
