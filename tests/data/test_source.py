"""What a place holds: folders, lists, idx files, shards, the embedded digits."""

import glob
import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import webdataset
from braceexpand import braceexpand
from PIL import Image

from lambdanets.cli import main
from lambdanets.data import folders, patterns
from lambdanets.data.decode import decode
from lambdanets.data.idx import read_idx
from lambdanets.data.patterns import expand_braces, matching
from lambdanets.data.shards import INDEX_FOLDER
from lambdanets.data.source import NoSplitError, Source, distinct_splits, notes_on, open_source, splits_of
from lambdanets.detect import coco
from tests.data.helpers import encoded, jpeg, picture, samples, write_folder, write_tar


def short(value: object) -> str:
    return repr(value)[:30]


def names(source: Source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_the_embedded_digits():
    train, validation = open_source("mnist"), open_source("mnist", split="validation")
    assert np.bincount(train.labels).tolist() == [400] * 10
    assert np.bincount(validation.labels).tolist() == [100] * 10
    digits = {np.asarray(s.read(i)).tobytes() for s in (train, validation) for i in range(len(s))}
    assert len(digits) == 5000  # no digit is in both
    assert np.asarray(train.read(0)).shape == (28, 28)
    assert not set(names(train)) & set(names(validation))


def test_class_folders(tmp_path: Path):
    write_folder(tmp_path / "set", {"cat": 2, "ant": 3})
    (tmp_path / "set" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "set" / "ant" / "deep").mkdir()
    (tmp_path / "set" / "ant" / "deep" / "x.PNG").write_bytes(encoded(picture(9), "PNG"))
    source = open_source(tmp_path / "set")
    assert source.class_names == ("ant", "cat")
    assert source.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert names(source)[3:5] == ["ant/deep/x.PNG", "cat/000.jpg"]
    assert source.read(4) == jpeg(0)
    assert splits_of(tmp_path / "set") == ("train",)
    with pytest.raises(NoSplitError, match=r"no validation images, only train.*hold out"):
        open_source(tmp_path / "set", split="validation")


def test_split_folders_share_the_training_classes(tmp_path: Path):
    write_folder(tmp_path / "train", {"a": 1, "b": 1, "c": 1})
    write_folder(tmp_path / "val", {"c": 2}, first=10)
    validation = open_source(tmp_path, split="validation")
    assert validation.class_names == ("a", "b", "c")
    assert validation.labels.tolist() == [2, 2]
    assert names(validation)[0] == "val/c/000.jpg"
    assert names(open_source(tmp_path))[0] == "train/a/000.jpg"
    assert list(distinct_splits(tmp_path)) == ["train", "validation"]
    write_folder(tmp_path / "val" / "new", {"x": 1})
    with pytest.raises(ValueError, match=r"'new'.*the training images do not have"):
        open_source(tmp_path, split="validation")


def test_train_may_be_a_class(tmp_path: Path):
    write_folder(tmp_path, {"bus": 1, "train": 2})
    assert open_source(tmp_path).class_names == ("bus", "train")


def test_images_without_folders_have_no_labels(tmp_path: Path):
    (tmp_path / "x.jpg").write_bytes(jpeg(0))
    source = open_source(tmp_path)
    assert source.labels.tolist() == [-1]
    assert source.class_names == ()


def test_an_empty_folder_says_what_is_expected(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no images.*one folder per class"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match=r"no such folder.*mnist.*csv.*tar"):
        open_source(tmp_path / "missing")


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    write_folder(tmp_path / "train", {"cat": 1, "dog": 1})
    monkeypatch.chdir(tmp_path)
    assert len(open_source(".")) == 2
    for read in (open_source, splits_of, coco.open_set, coco.splits_of):
        with pytest.raises(ValueError, match="the path of the dataset is empty"):
            read(text)


def test_a_walk_over_a_disk_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders, "MOST_OTHERS", 50)
    write_folder(tmp_path, {"zebra": 1})
    for i in range(40):
        (tmp_path / f"{i:02d}" / "deep").mkdir(parents=True)
        (tmp_path / f"{i:02d}" / "notes.txt").touch()
    visited = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **b: (visited.append(one[0]) or one for one in walk(*a, **b)))
    with pytest.raises(ValueError, match=r"does not look like a folder of images: 5\d other files.* 0 images so far"):
        open_source(tmp_path)
    assert 40 < len(visited) < 60  # of 81 folders
    with pytest.raises(ValueError, match="does not look like a folder of images"):
        folders.images_below(tmp_path)


def test_images_with_many_sidecar_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders, "MOST_OTHERS", 3)
    write_folder(tmp_path, {"a": 2, "b": 2})
    for i in range(9):
        (tmp_path / "a" / f"{i}.xml").touch()
    assert len(open_source(tmp_path)) == 4


def test_a_loop_of_links_ends(tmp_path: Path):
    write_folder(tmp_path, {"a": 2})
    os.symlink(tmp_path / "a", tmp_path / "a" / "again")
    assert len(open_source(tmp_path)) == 2


def test_lists(tmp_path: Path):
    write_folder(tmp_path / "images", {"a": 2})
    (tmp_path / "list.csv").write_text("path,label,split\nimages/a/001.jpg,dog,train\nimages/a/000.jpg,cat,val\n")
    train, validation = open_source(tmp_path / "list.csv"), open_source(tmp_path / "list.csv", split="validation")
    assert train.class_names == validation.class_names == ("cat", "dog")
    assert (train.labels.tolist(), validation.labels.tolist()) == ([1], [0])
    assert train.read(0) == jpeg(1)


def test_lists_with_numbers_and_without_a_header(tmp_path: Path):
    (tmp_path / "list.csv").write_text("x.jpg,10\ny.jpg,2\n")
    source = open_source(tmp_path / "list.csv")
    assert source.labels.tolist() == [10, 2]
    assert len(source.class_names) == 11
    with pytest.raises(FileNotFoundError):
        source.read(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            ("", "empty"),
            ("path,label\n", "no images"),
            ("a.jpg,1\nb.jpg\n", "line 2"),
            ("path,label\n,1\n", "no path"),
        ),
        ("path,label,label\na.jpg,1,2\n", "two columns named 'label'"),
        ("path,label,path\na.jpg,1,b.jpg\n", "two columns named 'path'"),
        ("a.jpg,1\n\n\nb.jpg,c\0t\n", "line 4 has a line break or a NUL byte"),
        ('a.jpg,"cat\nb.jpg,dog\n', "not a valid CSV file: line 2"),
        ('a.jpg,"cat\ndog"\n', "line 2 has a line break"),
        ("a.jpg,cat\n" + "b" * 200_000 + ",dog\n", "not a valid CSV file: line 2: field larger"),
        ("a.jpg,1\nb.jpg," + "9" * 400 + "\n", "label 9999.* is too large"),
        ("a.jpg,1\nb.jpg," + "9" * 5000 + "\n", "label 9999.* is too large"),
        ("a.jpg," + "x," * 50_000 + "\nb.jpg\n", "line 2"),
        ("a.jpg,-2\nb.jpg,0\n", "the label -2 is negative"),
        ("a.jpg,-2\nb.jpg,cat\n", "the label -2 is negative"),
        ("a.jpg,cat\nb.jpg,dog\nc.jpg,-1\n", "label -1 although labels are names"),
    ],
    ids=short,
)
def test_wrong_lists_are_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        open_source(tmp_path / "list.csv")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1", "utf-32"])
def test_lists_in_other_encodings_are_refused(tmp_path: Path, encoding: str):
    (tmp_path / "list.csv").write_bytes("path,label\na.jpg,été\n".encode(encoding))
    with pytest.raises(ValueError, match=r"list.csv.*(UTF-8|NUL)"):
        open_source(tmp_path / "list.csv")


def test_minus_one_among_numbers_is_no_label(tmp_path: Path):
    (tmp_path / "list.csv").write_text("x.jpg,2\ny.jpg,-1\nz.jpg,0\n")
    source = open_source(tmp_path / "list.csv")
    assert source.labels.tolist() == [2, -1, 0]
    assert source.class_names == ("0", "1", "2")


def test_a_list_with_splits_of_other_names_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "list.csv").write_text("path,label,split\na.jpg,cat,fold1\n")
    assert main(["data", "check", str(tmp_path / "list.csv")]) == 2
    assert "only 'fold1'" in capsys.readouterr().err


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def test_idx_files(tmp_path: Path):
    images = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([0, 3, 1, 2], np.uint8))))
    (tmp_path / "t10k-images.idx3-ubyte").write_bytes(idx(images[:2]))
    (tmp_path / "t10k-labels.idx1-ubyte").write_bytes(idx(np.array([1, 0], np.uint8)))
    train, test = open_source(tmp_path), open_source(tmp_path, split="test")
    assert train.labels.tolist() == [0, 3, 1, 2]
    assert np.array_equal(np.asarray(train.read(2)), images[2])
    assert test.class_names == train.class_names == ("0", "1", "2", "3")


LARGEST = b"\xff" * 4
IMAGES = idx(np.zeros((2, 30, 30), np.uint8))


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(IMAGES)[:-12],
        gzip.compress(IMAGES)[:-4] + b"xxxx",
        gzip.compress(IMAGES)[:10] + b"\xff" * 50,  # a bad deflate stream
        gzip.compress(IMAGES) + b"junk",
        gzip.compress(b"\0\0\x08\x03" + (2**12).to_bytes(4, "big") + (2**9).to_bytes(4, "big") * 2),
        IMAGES,
        b"",
    ],
    ids=["truncated", "wrong size", "bad deflate", "trailing bytes", "larger than its data", "not packed", "empty"],
)
def test_wrong_packed_idx_files_are_refused(tmp_path: Path, data: bytes):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(data)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(2, np.uint8)))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz"):
        open_source(tmp_path)


def test_a_header_does_not_decide_how_much_memory_is_taken(tmp_path: Path):
    header = b"\0\0\x08\x03" + (2**12).to_bytes(4, "big") + (2**10).to_bytes(4, "big") * 2  # 4 GiB
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header)
    tracemalloc.start()
    with pytest.raises(ValueError, match="has 0 bytes of data, but its header specifies 4,294,967,296"):
        read_idx(tmp_path / "train-images-idx3-ubyte")
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\0\0\x08\x03", b"\0\0\x08\x03\0\0\0\1\0\0", b"\x80\x04.......", IMAGES[:-1], IMAGES + b"x"),
        *(b"\0\0\x08\x03" + LARGEST * 3, b"\0\0\x08\x04" + LARGEST * 4, idx(np.zeros((2, 0, 3), np.uint8))),
        b"\0\0\x08\x03\0\0\0\2" + (10_000).to_bytes(4, "big") * 2,
    ],
)
def test_wrong_idx_files_are_refused(tmp_path: Path, data: bytes):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(data)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(2, np.uint8)))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte"):
        open_source(tmp_path)


def check_shards(source: Source, count: int) -> None:
    assert len(source) == count
    assert source.labels.tolist() == [i % 3 for i in range(count)]
    for i in (count - 1, 0, 3):  # any order
        assert source.read(i) == jpeg(i)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
def test_shards(tmp_path: Path, suffix: str):
    write_tar(tmp_path / f"train-0{suffix}", samples(4))
    write_tar(tmp_path / f"train-1{suffix}", samples(3, 4))
    write_tar(tmp_path / f"val-0{suffix}", samples(2, 7, classes=1))
    for _ in range(2):  # the second time from the cache
        check_shards(open_source(tmp_path), 7)
    check_shards(open_source(f"{tmp_path}/train-{{0..1}}{suffix}"), 7)
    check_shards(open_source(f"{tmp_path}/train-*{suffix}"), 7)
    check_shards(open_source(f"{tmp_path}/train-0{suffix}"), 4)
    validation = open_source(tmp_path, split="validation")
    assert names(validation) == [f"val-0{suffix}:00007", f"val-0{suffix}:00008"]
    assert validation.class_names == ("0", "1", "2")  # the training shards' classes


def test_a_shard_stays_open_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another thread may open more shards than a process keeps open before the bytes are read."""
    for shard in range(3):
        write_tar(tmp_path / f"train-{shard}.tar", samples(1, shard))
    source = open_source(tmp_path)
    monkeypatch.setattr("lambdanets.data.shards.OPEN", 1)
    read, begun = os.pread, []

    def late(*arguments: int) -> bytes:
        if not begun:  # as if other threads ran here
            begun.append(True)
            assert [source.read(i) for i in (1, 2, 0)] == [jpeg(1), jpeg(2), jpeg(0)]
        return read(*arguments)

    monkeypatch.setattr("lambdanets.data.shards.os.pread", late)
    assert source.read(0) == jpeg(0)


def test_a_changed_shard_is_walked_again(tmp_path: Path):
    write_tar(tmp_path / "x.tar", samples(2))
    assert len(open_source(tmp_path)) == 2
    write_tar(tmp_path / "x.tar", samples(5))
    check_shards(open_source(tmp_path), 5)


def test_a_spoilt_index_is_made_again(tmp_path: Path):
    write_tar(tmp_path / "x.tar", samples(4))
    open_source(tmp_path)
    (kept,) = (Path(os.environ["LAMBDANETS_CACHE"]) / INDEX_FOLDER).iterdir()
    good = json.loads(kept.read_text())
    odd = [
        *({"offsets": [10**9] * 4}, {"offsets": [0.5] * 4}, {"sizes": [True] * 4}, {"sizes": [10**400] * 4}),
        *({"keys": [1] * 4}, {"keys": "abcd"}, {"labels": [None] * 4}, {name: [] for name in good}, {"more": []}),
        *({"unread": []}, {"unread": {".heic": "1"}}),
    ]
    for spoilt in ("", "[]", "[" * 100_000, *(json.dumps(good | change) for change in odd)):
        kept.write_text(spoilt)
        check_shards(open_source(tmp_path), 4)


def test_labels_in_json_and_class_names(tmp_path: Path):
    members = [("a.png", encoded(picture(0), "PNG")), ("a.json", b'{"label": "dog"}')]
    members += [("b.jpg", jpeg(1)), ("b.json", b'{"cls": 0, "more": [1]}'), ("c.jpg", jpeg(2)), ("c.txt", b"hi")]
    write_tar(tmp_path / "x.tar", members)
    (tmp_path / "classes.txt").write_text("0\tn01\tcat\n1\tn02\tdog\n")
    source = open_source(tmp_path)
    assert source.class_names == ("cat", "dog")
    assert source.labels.tolist() == [1, 0, -1]
    assert decode(source.read(0)).size == (40, 32)  # type: ignore[arg-type]


def json_labels(folder: Path, *labels: object) -> Source:
    members = [(f"{i}.jpg", jpeg(i)) for i in range(len(labels))]
    members += [(f"{i}.json", json.dumps({"label": label}).encode()) for i, label in enumerate(labels)]
    write_tar(folder / "x.tar", members)
    return open_source(folder)


def test_numbers_among_names_are_refused(tmp_path: Path):
    """The number 1 would be the second name."""
    with pytest.raises(ValueError, match="numbers and names as labels, such as 1 and 'cat'"):
        json_labels(tmp_path, "cat", "dog", 1)


def test_minus_one_among_names_is_no_label(tmp_path: Path):
    source = json_labels(tmp_path, "cat", -1, "dog")
    assert source.class_names == ("cat", "dog")
    assert source.labels.tolist() == [0, -1, 1]


ORDERS = {
    "all images first": lambda pairs: [one for one, _ in pairs] + [label for _, label in pairs],
    "all labels first": lambda pairs: [label for _, label in pairs] + [one for one, _ in pairs],
    "interleaved": lambda pairs: [
        one for (image, _), (_, label) in zip(pairs, pairs[::-1], strict=True) for one in (image, label)
    ],
    "label first": lambda pairs: [one for pair in pairs for one in pair[::-1]],
}


@pytest.mark.parametrize("order", ORDERS)
def test_labels_belong_to_images_in_any_order(tmp_path: Path, order: str):
    members = samples(8)
    write_tar(tmp_path / "x.tar", ORDERS[order](list(zip(members[::2], members[1::2], strict=True))))
    check_shards(open_source(tmp_path), 8)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x"), ("a.jpg", b"y")], "a.jpg twice"),
        ([("a.jpg", b"x"), ("b.jpg", b"x"), ("a.cls", b"1"), ("b.cls", b"1"), ("a.cls", b"0")], "a.cls twice"),
        ([("a.jpg", b"x"), ("a.cls", b"1"), ("a.png", b"y")], r"a.jpg and a.png, two images of one key"),
        ([("a.1.png", b"x"), ("a.cls", b"1"), ("a.2.png", b"y")], r"a.1.png and a.2.png, two images of one key"),
        (
            [("a.jpg", b"x"), ("b.cls", b"1"), ("c.tiff", b"y"), ("c.cls", b"2")],
            r"2 labels without.*first is b.cls: add",
        ),
        ([("a.jpg", b"x"), ("a.cls", b" " * 2_000_000 + b"1")], r"a.cls has 2,000,001 bytes, too many for a label"),
    ],
    ids=short,
)
def test_members_that_do_not_pair_are_refused(tmp_path: Path, members: list[tuple[str, bytes]], message: str):
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path)


def test_other_images_of_a_key_are_left_out(tmp_path: Path):
    """As webdataset's users pack masks and depths, whose extensions have more than one part."""
    first, second = jpeg(0), jpeg(1)
    members = [("a.seg.png", b"x"), ("a.depth.png", b"y"), ("a.jpg", first), ("a.cls", b"1")]
    write_tar(tmp_path / "x.tar", [*members, ("b.large.jpg", second), ("b.cls", b"0")])
    source = open_source(tmp_path)
    assert [source.read(i) for i in range(len(source))] == [first, second]
    assert source.labels.tolist() == [1, 0]


def test_json_members_may_hold_any_numbers_beside_the_label(tmp_path: Path):
    """As img2dataset writes them: scores that are NaN, and hashes of more than 64 bits."""
    write_tar(
        tmp_path / "x.tar", [("a.jpg", jpeg(0)), ("a.json", b'{"label": 1, "p": NaN, "hash": ' + b"9" * 30 + b"}")]
    )
    assert open_source(tmp_path).labels.tolist() == [1]


@pytest.mark.parametrize("label", [b"", b"cat", b"\x80\x04K\x01.", b"7", b"9" * 400, b"1_0", b"1" + b" " * 40 + b"2"])
def test_wrong_labels_are_refused(tmp_path: Path, label: bytes):
    write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(0)), ("a.cls", label)])
    (tmp_path / "classes.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match="label"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"label": ' + b"9" * 400 + b"}",
        b'{"label": "' + b"9" * 5000 + b'"}',
        b'{"label": "9999999"}',
        b'{"label": "\\ud800"}',
        b'{"label": NaN}',
        b'{"label": 1.5}',
        b'{"label": true}',
        b'{"label": {"a": [1]}}',
        b"[1]",
        b"\xff\xfe\x00",
    ],
    ids=short,
)
def test_wrong_labels_in_json_are_refused(tmp_path: Path, content: bytes):
    write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(0)), ("a.json", content)])
    with pytest.raises(ValueError, match="label") as caught:
        open_source(tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cat\n\xe9t\xe9\n", "not UTF-8 text"),
        ("cat\ndog\n".encode("utf-16"), "not UTF-8 text"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"cat\ndog\ncat\n", "'cat' is duplicated"),
        (b"0\tcat\n1\t\n", "'' is invalid"),
        (b"cat\nd\0g\n", "is invalid"),
        (b"x" * (2**24 + 1), "is larger than the limit of"),
    ],
    ids=short,
)
def test_wrong_class_names_are_refused(tmp_path: Path, content: bytes, message: str):
    write_tar(tmp_path / "x.tar", samples(2))
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"classes.txt.*{message}"):
        open_source(tmp_path)


def test_class_names_of_other_systems_are_read(tmp_path: Path):
    write_tar(tmp_path / "x.tar", samples(3))
    (tmp_path / "classes.txt").write_bytes("\ufeffcat\r\nbig\u2028dog\r\nant\x0bs\r\n".encode())
    assert open_source(tmp_path).class_names == ("cat", "big\u2028dog", "ant\x0bs")


@pytest.mark.parametrize("pattern", ["{0..99999999}.tar", "{0..9}" * 12 + ".tar", "x-*/{a,b}{1..99999}.tar"])
def test_expansions_have_a_limit(tmp_path: Path, pattern: str):
    with pytest.raises(ValueError, match="expands to more than 100,000 names"):
        open_source(f"{tmp_path}/{pattern}")


@pytest.mark.parametrize(
    "pattern", ["{" * 3000 + ".tar", "{a,{b}.tar", "a}.tar{1,2}", "{%s}" % ("x," * 5000)], ids=short
)
def test_wrong_brace_lists_are_refused(pattern: str):
    with pytest.raises(ValueError, match="braces") as caught:
        expand_braces(pattern)
    assert len(str(caught.value)) < 400


def test_brace_lists_are_those_of_bash():
    generator = random.Random(0)
    parts = [
        "x",
        ",",
        "-",
        "{0..3}",
        "{b,c}",
        "{09..11}",
        "{c..a}",
        "{A..D..2}",
        "\\{",
        "{5..-1..2}",
        "{x}",
        "{a,{b,c}d}",
    ]
    for _ in range(300):
        pattern = "".join(generator.choices(parts, k=generator.randrange(1, 5)))
        for one in (pattern, f"{{{pattern}}}", f"y{{{pattern},z}}"):
            assert expand_braces(one) == list(braceexpand(one)), one


def test_wildcards_are_those_of_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a/x-1.tar", "a/x-2.tar", "a/.x-3.tar", "b/x-4.tar", "b/deep/x-5.tar", ".c/x-6.tar", "x-7.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in (
        "*/x-?.tar",
        "*/*.tar",
        "*",
        "**/*.tar",
        "a/x-[13].tar",
        "*/deep/*",
        ".*/*",
        "*/.x*",
        "a/x-1.tar",
        "no*",
    ):
        wanted = sorted(glob.glob(f"{tmp_path}/{pattern}"))
        assert [str(path) for path in matching(f"{tmp_path}/{pattern}")] == wanted, pattern
    monkeypatch.setattr(patterns, "MOST_ENTRIES", 6)
    with pytest.raises(ValueError, match="more than 6 files and folders"):
        matching(f"{tmp_path}/*/*/*.tar")


def test_what_is_called_a_shard_and_is_none_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(ValueError, match=r"pipe.tar is not a regular file"):
        open_source(f"{tmp_path}/*.tar")
    (tmp_path / "folder.tar").mkdir()
    with pytest.raises(ValueError, match="has no images"):
        open_source(tmp_path)


def test_what_webdataset_writes_is_read(tmp_path: Path):
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        for i in range(4):
            writer.write({"__key__": f"k{i}", "jpg": jpeg(i), "cls": i % 3})
    check_shards(open_source(tmp_path), 4)


def test_pixels_of_every_kind_become_rgb():
    grey = picture(0).convert("L")
    for image in (grey, picture(0).convert("P"), picture(0).convert("RGBA"), picture(0).convert("LA")):
        assert decode(encoded(image, "PNG")).mode == "RGB"
    assert decode(encoded(picture(0).convert("CMYK"))).mode == "RGB"
    assert decode(encoded(picture(0), "WEBP")).size == (40, 32)
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)  # 16 bits
    assert np.array_equal(np.asarray(decode(encoded(wide, "PNG"))), np.asarray(grey.convert("RGB")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,label,split\na.jpg,cat,train\nb.jpg,cat,trian\n", "rows with the split 'trian'"),
        ("path,label,split\na.jpg,cat,train\nb.jpg,cat,\n", "rows with the split ''"),
        ("path,label,split\na.jpg,cat,train\nb.jpg,cat,val\nc.jpg,cat,valid\n", "rows with both 'val' and 'valid'"),
        ("path,lab\0l,split\na.jpg,cat,train\n", "NUL"),
    ],
)
def test_a_list_with_rows_that_nothing_would_read_is_refused(tmp_path: Path, text: str, words: str):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"list\.csv.*{words}"):
        open_source(tmp_path / "list.csv")


def test_gif_bmp_and_jfif_are_read(tmp_path: Path):
    image = picture(0)
    frames = [Image.new("RGB", (20, 16), colour) for colour in ((250, 10, 10), (10, 250, 10))]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.gif").write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    (tmp_path / "a" / "1.BMP").write_bytes(encoded(image, "BMP"))
    (tmp_path / "a" / "2.jfif").write_bytes(jpeg(1))
    (tmp_path / "a" / "3.gif").write_bytes(encoded(frames[0].convert("P"), "GIF", transparency=0))
    source = open_source(tmp_path)
    assert [source.name(i) for i in range(4)] == ["a/0.gif", "a/1.BMP", "a/2.jfif", "a/3.gif"]
    first, second = (np.asarray(decode(source.read(i))) for i in range(2))  # type: ignore[arg-type]
    assert np.abs(first.astype(int) - (250, 10, 10)).max() < 8  # of an animation the first frame
    assert np.array_equal(second, np.asarray(image))
    assert notes_on([source]) == []


def test_files_that_are_not_read_are_counted_and_named(tmp_path: Path):
    write_folder(tmp_path, {"a": 2, "b": 1})
    for name in ("a/1.heic", "a/2.HEIC", "b/3.heic", "b/x.tiff", "b/notes.txt", "b/.heic"):
        (tmp_path / name).write_bytes(b"x")
    source = open_source(tmp_path)
    assert len(source) == 3
    assert notes_on([source, source]) == [
        f"4 files were not read in {tmp_path}: .heic (3), .tiff (1). Convert them to JPEG or PNG"
    ]
    for path in tmp_path.glob("*/*.jpg"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no images .*4 files were not read .*\.heic \(3\)"):
        open_source(tmp_path)


def test_images_of_a_shard_that_are_not_read_are_counted_and_named(tmp_path: Path):
    """Also where the index comes from the cache; not masks of images that are read."""
    members = [*samples(3), ("a.heic", b"x"), ("b.HEIC", b"x"), ("b.json", b'{"label": 1}'), ("c.tif", b"x")]
    write_tar(tmp_path / "x.tar", [*members, ("00000.mask.tif", b"x"), ("00001.dng", b"x"), ("notes.txt", b"x")])
    for _ in range(2):
        source = open_source(tmp_path)
        assert [source.name(i) for i in range(len(source))] == [f"x.tar:0000{i}" for i in range(3)]
        assert notes_on([source]) == [
            f"3 files were not read in {tmp_path}: .heic (2), .tif (1). Convert them to JPEG or PNG"
        ]


def test_images_beside_the_class_folders_are_counted_and_named(tmp_path: Path):
    write_folder(tmp_path / "train", {"a": 2, "b": 1})
    (tmp_path / "train" / "1.jpg").write_bytes(jpeg(5))
    where = f"{tmp_path / 'train'} outside the class folders and"
    source = open_source(tmp_path)
    assert len(source) == 3
    assert notes_on([source]) == [f"1 image is in {where} is not used: 1.jpg"]
    (tmp_path / "train" / "0.png").write_bytes(encoded(picture(0), "PNG"))
    assert notes_on([open_source(tmp_path)]) == [f"2 images are in {where} are not used: the first is 0.png"]


def labelled(source) -> dict[str, str]:
    return {source.name(i): source.class_names[source.labels[i]] for i in range(len(source))}


@pytest.mark.parametrize("target", ["..", "../..", "../bee", "../bee/inside", "../../elsewhere/all"])
def test_a_link_brings_no_other_class_into_a_class(tmp_path: Path, target: str):
    """A folder that holds the class, or is another class, also by way of a folder elsewhere."""
    root = write_folder(tmp_path / "set", {"ant": 2, "bee": 2}, first=0)
    write_folder(root / "bee", {"inside": 1}, first=9)
    (tmp_path / "elsewhere" / "all").mkdir(parents=True)
    os.symlink(root / "bee", tmp_path / "elsewhere" / "all" / "more")
    before = labelled(open_source(root))
    os.symlink(target, root / "ant" / "link")
    source = open_source(root)
    assert labelled(source) == before
    (note,) = notes_on([source])
    assert note.startswith("1 link was not followed, because the target contains this folder")
    assert "ant/link" in note


def test_links_to_images_elsewhere_are_followed(tmp_path: Path):
    """A class, or a part of one, may lie on another disk."""
    root = write_folder(tmp_path / "set", {"ant": 2})
    write_folder(tmp_path / "disk", {"bee": 2, "more ants": 1}, first=5)
    write_folder(tmp_path / "disk" / "bee", {"old": 1}, first=9)
    os.symlink(tmp_path / "disk" / "bee", root / "bee")
    os.symlink(tmp_path / "disk" / "more ants", root / "ant" / "more")
    os.symlink("old", root / "bee" / "same")  # within the class: counted once
    os.symlink(tmp_path / "disk", root / "ant" / "everything")  # holds a class
    os.symlink("../bee/old", root / "ant" / "of bees")
    source = open_source(root)
    names = labelled(source)
    bees = [name for name, label in names.items() if label == "bee"]
    assert bees == ["bee/000.jpg", "bee/001.jpg", "bee/old/000.jpg"]
    assert [name for name, label in names.items() if label == "ant"] == [
        "ant/000.jpg",
        "ant/001.jpg",
        "ant/more/000.jpg",
    ]
    (note,) = notes_on([source])
    assert note.startswith("2 links were not followed")


@pytest.mark.parametrize(
    ("target", "words"), [("ant", "are the same folder"), ("..", "contains"), ("ant/in", "lies inside")]
)
def test_a_class_that_is_a_link_to_another_is_refused(tmp_path: Path, target: str, words: str):
    root = write_folder(tmp_path / "set", {"ant": 2})
    write_folder(root / "ant", {"in": 1}, first=7)
    os.symlink(target, root / "zebra")
    with pytest.raises(ValueError, match=words) as refused:
        open_source(root)
    assert "zebra" in str(refused.value)
    assert "remove the link" in str(refused.value)


def test_splits_may_be_links_to_each_other(tmp_path: Path):
    write_folder(tmp_path / "train", {"ant": 2, "bee": 1})
    write_folder(tmp_path / "val", {"ant": 1, "bee": 1}, first=5)
    os.symlink("val", tmp_path / "test")
    assert len(open_source(tmp_path, split="test")) == 2
