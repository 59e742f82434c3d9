"""Threshold and balance are exact, on a case by hand and against sorting everything."""

import json

import numpy as np
import pytest

from benchmarks.pseudo_select import Simulate
from lambdanets.cli import main
from lambdanets.pseudo import select as select_module
from lambdanets.pseudo.select import Selection, read_counts, select
from tests.pseudo.made import contents, repeats, write_made_labels

NAMES = ("a", "b", "c", "d")


def test_a_case_by_hand(tmp_path):
    labels = [[0, 0, 0, 1, 0], [1, 0, 2, 2, 0]]
    confidences = [[0.9, 0.5, 0.95, 0.3, 0.2], [0.8, 0.7, 0.4, 0.6, 0.29]]
    folder = write_made_labels(tmp_path, labels, confidences, NAMES)
    counts = select(folder, Selection(threshold=0.3, most=3, least=3))
    # a: .95 .9 .7 stay and .5 goes; b: .8 twice and .3 once; c: .6 twice, .4 once; d has nothing to repeat
    first, second = repeats(folder, [5, 5])
    assert first.tolist() == [1, 0, 1, 1, 0]
    assert second.tolist() == [2, 1, 1, 2, 0]
    assert counts.labelled == (6, 2, 2, 0)
    assert counts.confident == (4, 2, 2, 0)
    assert counts.kept == (3, 2, 2, 0)
    assert counts.used == (3, 3, 3, 0)
    assert sum(counts.histogram[0]) == 6
    assert counts.histogram[1] == tuple(1 if i in (6, 16) else 0 for i in range(20))
    assert read_counts(folder) == counts


def test_without_limits_all_above_the_threshold_stay(tmp_path):
    folder = write_made_labels(tmp_path, [[0, 1, 1]], [[0.3, 0.299, 1.0]], NAMES)
    select(folder, Selection(threshold=0.3))
    assert repeats(folder, [3])[0].tolist() == [1, 0, 1]  # 0.3 itself is in, though float32 has rounded it


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("counters", [2**24, 2**7])  # few digits, many passes
def test_it_is_what_sorting_would_give(tmp_path, monkeypatch, seed, counters):
    monkeypatch.setattr(select_module, "COUNTERS", counters)
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 80, 9).tolist()
    labels = [generator.choice(4, n, p=[0.6, 0.3, 0.08, 0.02]) for n in sizes]
    levels = [3, 1000][seed % 2]  # with three levels nearly all are ties
    confidences = [(generator.integers(0, levels, n) / levels).astype(np.float32) for n in sizes]
    folder = write_made_labels(tmp_path, labels, confidences, NAMES)
    most, least, threshold = 40, 25, [0.0, 0.4][seed // 2 % 2]
    counts = select(folder, Selection(threshold=threshold, most=most, least=least, seed=seed))
    used = np.concatenate(repeats(folder, sizes))
    label, confidence = np.concatenate(labels), np.concatenate(confidences)
    for c in range(4):
        mine = (label == c) & (confidence >= np.float32(threshold))
        have = int(mine.sum())
        assert not used[(label == c) & ~mine].any()
        best_first = used[mine][np.argsort(-confidence[mine], kind="stable")]
        expected = min(max(have, least), most) if have else 0
        assert best_first.sum() == expected == counts.used[c]
        if have > most:
            assert set(best_first) == {0, 1}
        elif have:
            assert set(best_first) <= {expected // have, expected // have + 1}
        order = np.sort(confidence[mine])[::-1]
        extra = used[mine] > used[mine].min()  # those that are used more are the most confident
        assert np.array_equal(np.sort(confidence[mine][extra])[::-1], order[: extra.sum()])


def test_the_seed_decides_between_equals_and_nothing_else(tmp_path):
    label = np.zeros(300, int)
    confidence = np.where(np.arange(300) < 50, 0.9, 0.5)
    found = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = write_made_labels(tmp_path / name, [label], [confidence], NAMES)
        select(folder, Selection(most=100, seed=seed))
        found[name] = contents(folder)
        assert repeats(folder, [300])[0][:50].all()
    assert found["a"] == found["b"]
    selected = "selected/000000.safetensors"
    assert found["a"][selected] != found["c"][selected]


def test_what_is_equal_in_the_hash_too_is_still_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(select_module.order, "mixed", lambda key, numbers: np.zeros(len(numbers), np.uint64))
    folder = write_made_labels(tmp_path, [np.zeros(30, int)] * 3, [np.ones(30)] * 3, NAMES)
    select(folder, Selection(most=47))
    assert [row.sum() for row in repeats(folder, [30] * 3)] == [30, 17, 0]


def test_bad_input_is_refused_with_a_sentence(tmp_path, capsys):
    with pytest.raises(ValueError, match="least must not be larger than most"):
        Selection(most=3, least=4)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Selection(threshold=1.5)
    assert main(["pseudo", "select", str(tmp_path / "nothing")]) == 2
    assert "labels.json" in capsys.readouterr().err
    folder = write_made_labels(tmp_path, [[0, 1], [1]], [[0.5, 0.5], [0.5]], NAMES)
    (folder / "labels" / "000001.safetensors").unlink()
    with pytest.raises(ValueError, match="1 of 2 units have no labels"):
        select(folder, Selection())
    assert select(folder, Selection(partial=True)).missing == ("unit-1",)
    (folder / "labels" / "000001.safetensors").write_bytes(b"no labels")
    with pytest.raises(ValueError, match="damaged"):
        select(folder, Selection())


def test_memory_does_not_grow_with_the_images(tmp_path, capsys):
    """The simulation of the documents, a hundred times smaller. Its peak is that of the process: only the numbers."""
    assert Simulate(entries=100_000, classes=50, unit=1000, soft=2, output=tmp_path / "found.json").run() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["units"] == 100
    assert found["used"] == 50 * found["most"]
    assert json.loads(capsys.readouterr().out) == found


def test_a_manifest_that_has_lost_a_unit_is_refused(tmp_path):
    folder = write_made_labels(tmp_path, [np.array([0, 1])] * 3, [np.array([0.9, 0.8])] * 3, ("a", "b"))
    manifest = json.loads((folder / "labels.json").read_text())
    del manifest["units"][1]
    (folder / "labels.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"labels\.json is damaged: it has 2 units, but .*000002\.safetensors"):
        select(folder, Selection())
