"""The page of a labelled folder: numbers, pictures, and nothing that a name could smuggle in."""

import re

import numpy as np

from lambdanets.pseudo.files import read_manifest
from lambdanets.pseudo.label import LabelOptions
from lambdanets.pseudo.page import PICTURES, extremes, write_page
from lambdanets.pseudo.select import Selection, select
from tests.pseudo.made import label_all, make_files, make_shards, make_teacher, write_made_labels
from tests.train.weights import NAMES


def test_it_shows_counts_histograms_and_pictures(tmp_path):
    hostile = (*NAMES[:-1], "<script>alert(1)</script>")
    teacher = make_teacher(tmp_path / "teacher.safetensors", names=hostile)
    for name, images in (("files", make_files(tmp_path / "files", 30)), ("tars", make_shards(tmp_path / "tars"))):
        label_all(teacher, images, tmp_path / name / "out", LabelOptions(batch_size=8))
        counts = select(tmp_path / name / "out", Selection(most=7, least=3))
        text = write_page(tmp_path / name / "out").read_text()
        assert '"Segoe UI"' in text  # the style sheet is no text to be escaped
        assert '<i style="height:' in text
        assert "<script" not in text
        assert "&lt;script&gt;alert(1)" in text
        assert not re.search(r"""(src|href)=["']?(?!data:|"data:)[a-z]+:""", text)
        kept = [n for n in counts.kept if n]
        assert text.count("<figure>") == sum(min(n, PICTURES) for n in kept)
        assert text.count("data:image/") == text.count("<figure>")
        for labelled, used in zip(counts.labelled, counts.used, strict=True):
            assert f'<td class="n">{labelled:,}</td>' in text
            assert f'<td class="n">{used:,}</td>' in text


def test_pictures_that_have_gone_are_no_error(tmp_path):
    teacher = make_teacher(tmp_path / "teacher.safetensors")
    images = make_files(tmp_path / "files", 12)
    label_all(teacher, images, tmp_path / "out", LabelOptions(batch_size=8))
    select(tmp_path / "out", Selection())
    for path in (images / "somewhere").iterdir():
        path.unlink()
    assert "Images not shown" in write_page(tmp_path / "out").read_text()


def test_the_most_and_least_confident_ones_are_shown(tmp_path):
    generator = np.random.default_rng(0)
    labels = [generator.integers(0, 2, 50) for _ in range(4)]
    confidences = [generator.random(50).astype(np.float32) for _ in range(4)]
    folder = write_made_labels(tmp_path, labels, confidences, ("a", "b"))
    select(folder, Selection(threshold=0.2))
    found = extremes(folder, read_manifest(folder), [0, 1])
    label, confidence = np.concatenate(labels), np.concatenate(confidences)
    for c in (0, 1):
        mine = np.sort(confidence[(label == c) & (confidence >= np.float32(0.2))])[::-1]
        half = PICTURES // 2
        expected = [*mine[:half], *mine[-half:]]
        assert [one.confidence for one in found[c]] == [float(value) for value in expected]
