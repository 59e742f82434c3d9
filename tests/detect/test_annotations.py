"""COCO files with faults: every bad entry is named, nothing crashes, and no good picture is lost."""

import copy
import json
import random

import numpy as np
import pytest

from lambdanets.data.decode import EXTENSIONS, BrokenImageError
from lambdanets.detect import rle
from lambdanets.detect.annotations import read_scenes
from lambdanets.detect.coco import open_set, splits_of
from lambdanets.detect.images import FolderImages, TarImages
from tests.detect.helpers import png, write_shapes, write_tar

FILES = {f"{i}.png": png(np.full((20, 30, 3), 9 * i, np.uint8)) for i in range(6)}


def good() -> dict:
    """Six pictures of 30 x 20, with two objects each but the last; polygons, run lengths in both forms, a crowd."""
    mask = np.zeros((20, 30), bool)
    mask[4:9, 3:11] = True
    runs = rle.encode(mask)
    outlines = [[[3, 4, 11, 4, 11, 9, 3, 9]], runs, {"size": [20, 30], "counts": rle.unpack(runs["counts"])}]
    annotations = [
        {
            "id": 10 * i + j,
            "image_id": i,
            "category_id": 1 + (i + j) % 2,
            "bbox": [3 + j, 4, 8, 5],
            "area": 40,
            "iscrowd": int(i == 4 and j == 1),
            "segmentation": copy.deepcopy(outlines[(i + j) % 3]),
        }
        for i in range(5)
        for j in range(2)
    ]
    return {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 30, "height": 20} for i in range(6)],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }


@pytest.fixture
def files(tmp_path):
    return TarImages([write_tar(tmp_path / "train.tar", FILES)])


def read(tmp_path, data, files, **options):
    path = tmp_path / "a.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_scenes(path, files, **options)


def test_a_good_file_is_read_whole(tmp_path, files):
    scenes = read(tmp_path, good(), files)
    assert not scenes.problems
    assert (len(scenes), scenes.objects, scenes.masks) == (6, 10, True)
    assert scenes.class_names == ("cat", "dog")
    picture = scenes.pictures[4]
    assert picture.crowd_N.tolist() == [False, True]
    np.testing.assert_array_equal(picture.boxes_N4, [[3, 4, 11, 9], [4, 4, 12, 9]])
    for segment in (s for p in scenes.pictures for s in p.segments):
        assert rle.bounds(segment.mask((20, 30))) == (3, 4, 11, 9)
    again = scenes.as_coco()
    assert [a["id"] for a in again["annotations"]] == list(range(1, 11))  # COCO's evaluator loses an annotation 0
    assert {a["category_id"] for a in again["annotations"]} == {1, 2}


ONE = {  # what is changed in annotation 3, and a word of the sentence
    "empty box": ({"bbox": [3, 4, 0, 5]}, "empty"),
    "inverted box": ({"bbox": [10, 4, -5, 5]}, "inverted"),
    "box of three": ({"bbox": [3, 4, 8]}, "four numbers"),
    "box of text": ({"bbox": ["3", 4, 8, 5]}, "four numbers"),
    "box that is not finite": ({"bbox": [3, float("nan"), 8, 5]}, "four numbers"),
    "box outside": ({"bbox": [300, 4, 8, 5]}, "outside"),
    "huge number": ({"bbox": [3, 4, 10**400, 5]}, "four numbers"),
    "unknown category": ({"category_id": 99}, "unknown category 99"),
    "category in text": ({"category_id": "cat"}, "must be an integer"),
    "unknown picture": ({"image_id": 77}, "no image 77"),
    "odd polygon": ({"segmentation": [[1, 2, 3, 4, 5, 6, 7]]}, "three points"),
    "polygon of two points": ({"segmentation": [[1, 2, 3, 4]]}, "three points"),
    "polygon of text": ({"segmentation": [["a"] * 6]}, "three points"),
    "polygon elsewhere": ({"segmentation": [[50, 50, 60, 50, 60, 60]]}, "outside"),
    "polygon without area": ({"segmentation": [[3, 4, 5, 4, 9, 4]]}, "no area"),
    "no outline": ({"segmentation": []}, "no mask"),
    "outline in text": ({"segmentation": "here"}, "polygons or run lengths"),
    "run lengths of another picture": ({"segmentation": {"size": [9, 9], "counts": [81]}}, "[9, 9]"),
    "run lengths that are too short": ({"segmentation": {"size": [20, 30], "counts": [5, 5]}}, "cover 10 pixels"),
    "run lengths below 0": ({"segmentation": {"size": [20, 30], "counts": [610, -10]}}, "at least 0"),
    "run lengths of nothing": ({"segmentation": {"size": [20, 30], "counts": [600]}}, "empty"),
    "run lengths of garbage": ({"segmentation": {"size": [20, 30], "counts": "\x01"}}, "characters"),
    "outline of very many points": ({"segmentation": [[1.0, 2.0, 3.0, 4.0] * 25_001]}, "more than 50,000 points"),
    "nested picture": ({"image_id": [[[[[[]]]]]]}, "must be an integer"),
    "id of 400 digits": ({"image_id": 10**400}, "must be an integer"),
    "polygon far away": ({"segmentation": [[1e300, 2, 3, 4, 5, 6]]}, "reaches far out"),
    "crowd of two": ({"iscrowd": 2}, "iscrowd"),
}


@pytest.mark.parametrize(("change", "words"), ONE.values(), ids=ONE)
def test_a_bad_annotation_is_named_and_left_out(tmp_path, files, change, words):
    data = good()
    data["annotations"][3] |= change
    scenes = read(tmp_path, data, files)
    (problem,) = scenes.problems
    assert "annotations[3] (id 11)" in problem.where
    assert words in problem.reason
    assert "\n" not in str(problem)
    assert (len(scenes), scenes.objects) == (6, 9)


def test_the_same_annotation_twice_counts_once(tmp_path, files):
    data = good()
    data["annotations"].append(data["annotations"][3] | {"area": 41})
    data["annotations"].append(data["annotations"][3] | {"bbox": [5, 4, 8, 5]})  # numbers are often used twice
    scenes = read(tmp_path, data, files)
    (problem,) = scenes.problems
    assert str(problem).startswith("annotations[10] (id 11): 1.png: another annotation has the same id")
    assert scenes.objects == 11


def test_a_picture_with_too_many_pixels_is_named_and_costs_nothing(tmp_path, files):
    """Its outlines would be drawn on 931 GiB."""
    data = good()
    data["images"][1] |= {"width": 1_000_000, "height": 1_000_000}
    del data["annotations"][3]["area"]
    for source in (files, None):
        scenes = read(tmp_path, data, source)
        assert len(scenes) == 5
        assert "1.png has 1000000 x 1000000 pixels, more than the limit of 80,000,000" in scenes.problems[0].reason


@pytest.mark.parametrize("depth", [100, 900, 980, 3000])
def test_deep_nesting_is_a_sentence(tmp_path, files, depth):
    text = json.dumps(good()).replace('"file_name": "1.png"', f'"file_name": {"[" * depth}{"]" * depth}')
    try:
        scenes = read(tmp_path, text, files)
    except ValueError as error:
        assert "nested too deeply" in str(error)  # noqa: PT017  # how deep Python reads depends on its version
    else:
        assert scenes.problems[0].reason == "it has no file_name"


def test_a_picture_without_its_file_is_named_and_its_annotations_too(tmp_path, files):
    data = good()
    data["images"][2]["file_name"] = "../../etc/passwd.png"
    scenes = read(tmp_path, data, files)
    assert len(scenes) == 5
    assert [p.where.partition(" ")[0] for p in scenes.problems] == ["images[2]", "annotations[4]", "annotations[5]"]
    assert "missing" in scenes.problems[0].reason


def test_a_picture_is_never_taken_for_another(tmp_path):
    """Leading folders may differ, but a file that has an entry of its own stands in for no missing one."""
    files = TarImages([write_tar(tmp_path / "train.tar", {"here/0.png": FILES["0.png"], "here/1.png": FILES["1.png"]})])
    data = good()
    for i, name in enumerate(("here/0.png", "there/0.png", "there/1.png", "2.tif")):
        data["images"][i]["file_name"] = name
    scenes = read(tmp_path, data, files)
    assert [picture.name for picture in scenes.pictures] == ["here/0.png", "here/1.png"]
    said = {problem.where: problem.reason for problem in scenes.problems}
    assert said["images[1] (id 1)"] == "the file there/0.png is missing"
    assert said["images[3] (id 3)"] == f"2.tif must end in one of {', '.join(EXTENSIONS)}"


def test_sizes_that_the_file_lacks_are_measured(tmp_path, files):
    data = good()
    for key, value in (("width", None), ("height", "tall"), ("width", -3), ("height", 0.5)):
        data["images"][1][key] = value
        scenes = read(tmp_path, data, files)
        assert scenes.pictures[1].size == (20, 30)
        assert not scenes.problems


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not usable JSON"),
        ("{", "not usable JSON"),
        ("[" * 100_000, "not usable JSON"),
        ("[]", "not a COCO file"),
        ('{"images": {}}', "must be a list"),
        ("{}", "no categories"),
        ('{"categories": [{"id": 1, "name": "a"}]}', "no usable image"),
        ("\udcff", "not usable JSON"),
    ],
)
def test_what_is_no_coco_file_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=words):
        read_scenes(path, None)


GARBAGE = [None, True, -1, 2**70, 1.5, float("nan"), "", "x" * 500, "\u202e\x00", [], [[]], {}, {"id": []}, [None] * 4]


def spoil(generator: random.Random, data: dict) -> set[tuple[str, int]]:
    """Changes some entries at random; returns which."""
    touched = set()
    for _ in range(generator.randint(1, 6)):
        key = generator.choice(["images", "annotations", "annotations", "annotations", "categories"])
        if key == "categories" and len(data[key]) < 2:
            continue
        place = generator.randrange(len(data[key]))
        touched.add((key, place))
        entry = data[key][place]
        kind = generator.randrange(4)
        if kind == 0 or not isinstance(entry, dict) or not entry:
            data[key][place] = generator.choice(GARBAGE)
        elif kind == 1:
            entry.pop(generator.choice(list(entry)))
        elif kind == 2:
            entry[generator.choice(list(entry))] = generator.choice(GARBAGE)
        else:
            deep = generator.choice([k for k in entry if isinstance(entry[k], list)] or list(entry))
            if isinstance(entry[deep], list) and entry[deep]:
                entry[deep][generator.randrange(len(entry[deep]))] = generator.choice(GARBAGE)
            else:
                entry[deep] = generator.choice(GARBAGE)
    return touched


@pytest.mark.parametrize("part", range(4))
def test_two_hundred_files_spoilt_at_random(tmp_path, files, part):
    told = 0
    for seed in range(50 * part, 50 * (part + 1)):
        generator = random.Random(seed)
        data = good()
        touched = spoil(generator, data)
        before = good()
        changed = {(k, i) for k, i in touched if json.dumps(data[k][i]) != json.dumps(before[k][i])}
        try:
            scenes = read(tmp_path, data, files, masks="yes")
        except ValueError:  # nothing of the file can be used
            told += 1
            continue
        # A picture whose entry is as it was stays, whatever happened to the others.
        names = {picture.name: picture for picture in scenes.pictures}
        clashing = {
            entry.get("id")
            for k, i in changed
            if k == "images" and isinstance(entry := data[k][i], dict)
            if isinstance(entry.get("id"), int)
        }
        for i in range(6):
            if ("images", i) not in changed and i not in clashing:
                assert f"{i}.png" in names, (seed, scenes.problems)
        # And so does every annotation that is as it was, of such a picture and a known category.
        known = {category.id for category in scenes.categories}
        for i, annotation in enumerate(before["annotations"]):
            picture = names.get(f"{annotation['image_id']}.png")
            whole = ("images", annotation["image_id"]) not in changed and annotation["image_id"] not in clashing
            if ("annotations", i) not in changed and whole and picture and annotation["category_id"] in known:
                assert annotation["bbox"] in picture.given_N4.tolist(), (seed, scenes.problems)
        lost = 10 - scenes.objects + 6 - len(scenes)
        assert bool(scenes.problems) >= (lost > 0), seed  # nothing goes without a word
        told += bool(scenes.problems)
        for problem in scenes.problems:
            assert str(problem).isprintable()
            assert len(str(problem)) < 500
    assert told > 35  # some changes are harmless: an area, an outline in other words


def test_layouts(tmp_path):
    packed = write_shapes(tmp_path / "packed", 3, tar=True)
    plain = write_shapes(tmp_path / "plain", 3)
    usual = tmp_path / "usual"
    (usual / "annotations").mkdir(parents=True)
    (plain / "train").rename(usual / "train2017")
    (plain / "instances_train.json").rename(usual / "annotations" / "instances_train2017.json")
    wanted = open_set("shapes")
    for where in (packed, usual):
        data = open_set(str(where))
        assert splits_of(str(where)) == ("train",)
        assert len(data) == 3
        for i in range(3):
            assert data.read(i) == png(wanted.read(i))
            np.testing.assert_array_equal(data.scenes.pictures[i].boxes_N4, wanted.scenes.pictures[i].boxes_N4)
    beside = open_set(str(packed / "instances_train.json"), images=str(packed / "train.tar"))
    assert len(beside) == 3
    with pytest.raises(ValueError, match="validation"):
        open_set(str(packed), "validation")
    with pytest.raises(ValueError, match="no such folder"):
        open_set(str(tmp_path / "nowhere"))


def test_only_listed_files_can_be_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(FILES["0.png"])
    (tmp_path / "secret.png").write_bytes(b"secret")
    files = FolderImages(tmp_path / "in")
    assert files.find("a.png") == "a.png"
    assert files.find("images/a.png") == "a.png"
    assert files.find("../secret.png") is None
    with pytest.raises(BrokenImageError):
        files.read("../secret.png")


def test_another_file_must_mean_the_same_classes(tmp_path, files):
    first = read(tmp_path, good(), files)
    other = good()
    other["categories"] = [{"id": 1, "name": "horse"}]
    with pytest.raises(ValueError, match="horse"):
        read(tmp_path, other, files, categories=first.categories)
