"""Texts, training by the one loop, weights, commands; both kinds learn more than counted pairs."""

import io
import json
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from lambdanets.cli import main
from lambdanets.experiments.language.corpus import Corpus, python_files, read_corpus
from lambdanets.experiments.language.network import ByteModelConfig
from lambdanets.experiments.language.task import Language, LanguageConfig, bigram_bits, evaluate, load_language, regions
from lambdanets.train.config import Schedule
from lambdanets.train.distributed import World
from lambdanets.train.loop import fit
from lambdanets.train.task import Share
from tests.support.scripts import script

language_models = script("benchmarks/language_models.py")
SENTENCE = b"the quick brown fox jumps over the lazy dog and the cat sat on the mat. "
SMALL = ByteModelConfig(width=16, depth=1, attention_heads=2, key_depth=4, reach=7)


@pytest.fixture
def corpus():
    data = np.frombuffer(bytearray(SENTENCE * 40), np.uint8)
    return Corpus("fox", data, data[:500], 1)


def settings(out, **changes):
    usual = dict(out=out, model=SMALL, length=32, batch_size=4, epochs=2.0, log_every=5, evaluated=0, device="cpu")
    return LanguageConfig(**(usual | dict(schedule=Schedule(rate=1e-2, per_batch=0, warmup_epochs=0.1)) | changes))


# Texts


def test_the_standard_library_is_a_text():
    found = read_corpus()
    assert 4e6 < len(found.training) < 30e6
    assert 0.03 < len(found.validation) / len(found.training) < 0.3
    assert b"def dump(obj" in found.training.tobytes() + found.validation.tobytes()
    assert found.digest == read_corpus().digest


def test_what_belongs_to_one_machine_is_left_out(tmp_path):
    for name in ("os.py", "json/tool.py", "_sysconfigdata_x.py", "site-packages/x.py", "json/tests/y.py", "os.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("x")
    assert sorted(p.relative_to(tmp_path).as_posix() for p in python_files(tmp_path)) == ["json/tool.py", "os.py"]


def test_texts_of_your_own(tmp_path):
    (tmp_path / "one.txt").write_bytes(SENTENCE * 10)
    alone = read_corpus(str(tmp_path / "one.txt"))
    assert alone.training.tobytes() + alone.validation.tobytes() == b"\0" + SENTENCE * 10
    for i in range(20):
        (tmp_path / f"{i}.md").write_text(f"text {i}")
    many = read_corpus(str(tmp_path))
    assert many.files == 21
    assert many.validation.tobytes().count(b"\0") == 2  # whole files
    for wrong, words in ((tmp_path / "none", "is not a text file"), (empty(tmp_path), "too few for training")):
        with pytest.raises((ValueError, OSError), match=words):
            read_corpus(str(wrong))


def empty(folder):
    (folder / "nothing").mkdir()
    return folder / "nothing"


def test_sequences_are_the_text_and_do_not_depend_on_who_reads_them(tmp_path, corpus):
    task = Language(settings(tmp_path), corpus)
    whole = list(task.batches(1, 0, Share(0, 1, 8, 1)))
    assert all(row.numpy().tobytes() in corpus.training.tobytes() for row in torch.cat(whole))
    assert not torch.equal(whole[0], next(task.batches(2, 0, Share(0, 1, 8, 1))))
    parts = [list(task.batches(1, 0, Share(rank, 2, 2, 2))) for rank in (0, 1)]
    cut = [torch.cat([parts[i % 2][i // 2] for i in range(4 * step, 4 * step + 4)]) for step in range(len(whole))]
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    assert torch.equal(next(task.batches(1, 3, Share(0, 1, 8, 1))), whole[3])
    assert len(whole) == task.examples // 8


# Scores


class Pairs(torch.nn.Module):
    """A model that has counted pairs."""

    def __init__(self, training):
        super().__init__()
        counts = np.zeros((256, 256))
        np.add.at(counts, (training[:-1], training[1:]), 1)
        single = (counts.sum(0) + 1) / (counts.sum() + 256)
        self.scores = torch.from_numpy(np.log((counts + single) / (counts.sum(1, keepdims=True) + 1)))

    def forward(self, text_BN):
        return self.scores[text_BN]


def test_counted_pairs_cost_what_a_model_of_them_costs(corpus):
    found = regions(corpus.validation, 32)
    score = evaluate(Pairs(corpus.training), found, 32, World())
    assert score["bits_per_byte"] == pytest.approx(bigram_bits(corpus, found), rel=1e-5)
    assert score["examples"] == found[:, 1:].numel()


def test_sequences_of_every_length_predict_the_same_bytes(corpus):
    found = regions(corpus.training, 64, most=1000)
    assert found.shape[1] % 64 == 1
    assert {evaluate(Pairs(corpus.training), found, n, World())["examples"] for n in (16, 64)} == {found[:, 1:].numel()}
    with pytest.raises(ValueError, match="500 bytes of validation text are too few for sequences of 600"):
        regions(corpus.validation, 600)


# Training


@pytest.mark.parametrize("kind", ["lambda", "attention"])
def test_it_learns_resumes_and_writes(tmp_path, corpus, kind):
    config = settings(tmp_path / "run", model=replace(SMALL, kind=kind), epochs=6.0)
    task = Language(config, corpus)
    result = fit(task, config)
    bits = result.scores["ema"]["validation"]["bits_per_byte"]
    assert bits < bigram_bits(corpus, task.regions) - 0.3
    model, about = load_language(str(tmp_path / "run"))
    assert about.model == config.model
    again = evaluate(model, task.regions, 32, World())
    assert again["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert b" the " in bytes(model.generate(b"\0the quick brown", 60, temperature=0.0))


def test_a_run_that_is_stopped_goes_on(tmp_path, corpus):
    def stop(record):
        if record["event"] == "step" and record["step"] == 10:
            signal.raise_signal(signal.SIGTERM)

    whole, parts = (settings(tmp_path / name) for name in ("whole", "parts"))
    expected = fit(Language(whole, corpus), whole)
    assert fit(Language(parts, corpus), parts, watch=stop).step == 10
    found = fit(Language(parts, corpus), parts, resume=True)
    assert found.scores == expected.scores


def test_refused_settings(tmp_path, corpus):
    with pytest.raises(ValueError, match="2880 bytes of training text are too few for sequences of 5000"):
        Language(settings(tmp_path, length=5000), corpus)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        settings(tmp_path, length=0)


def test_commands(tmp_path, capsys, monkeypatch):
    (tmp_path / "fox.txt").write_bytes(SENTENCE * 60)
    run = str(tmp_path / "run")
    words = [
        "experiments",
        "language",
        "train",
        "start",
        "--text",
        str(tmp_path / "fox.txt"),
        "--out",
        run,
        "--length",
        "32",
    ]
    words += ["--model.width", "16", "--model.depth", "1", "--epochs", "1", "--device", "cpu"]
    assert main(words) == 0
    assert "sequences of 32 bytes" in capsys.readouterr().out
    written = []
    for _ in range(2):
        screen = SimpleNamespace(buffer=io.BytesIO(), write=lambda text: None, flush=lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            assert main(["experiments", "language", "generate", run, "--prompt", "the ", "--count", "30"]) == 0
        written.append(screen.buffer.getvalue())
    assert written[0] == written[1]
    assert len(written[0]) == 30
    assert main(["experiments", "language", "generate", str(tmp_path)]) == 2
    assert "has no weights.safetensors" in capsys.readouterr().err


def test_compare(tmp_path, corpus):
    options = language_models.CompareLanguage(minutes=1e-9, turn=3, evaluations=2, context=(16, 32), lengths=(64,))
    result = json.loads(
        json.dumps(language_models.compare(options, corpus, settings(tmp_path), Console(file=io.StringIO())))
    )
    for kind in ("lambda", "attention"):
        found = result["training"][kind]
        assert [point["step"] for point in found["curve"]] == [3, 6]
        assert found["bytes_per_second"] > 0
        assert result["equal_steps"][kind] == found["bits_per_byte"]
    (row,) = result["generation"]
    assert row["length"] == 64
    for kind in ("lambda", "attention"):
        assert row[kind]["milliseconds"] > 0
        assert row[kind]["state_bytes"] > 0
    assert row["lambda"]["state_bytes"] < row["attention"]["state_bytes"]
    assert [row["length"] for row in result["context"]] == [16, 32]
    script("benchmarks/plot_results.py").draw(result, tmp_path / "language.svg")
    assert "<svg" in (tmp_path / "language.svg").read_text()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [("--minutes 0", "--minutes 0: must be above 0"), ("--lengths 64 0", "--lengths 0"), ("--context", "at least one"),
     ("--threads 0", "--threads must be at least 1, got 0")],
)  # fmt: skip
def test_a_comparison_that_cannot_be_is_refused_before_it_trains(tmp_path, wrong, sentence, monkeypatch):
    monkeypatch.setattr(language_models, "train_in_turns", lambda *_: pytest.fail("it trains"))
    with pytest.raises(ValueError, match=sentence):
        language_models.main(["--output", str(tmp_path / "a.json"), *wrong.split()])


def test_the_comparison_says_where_it_is_now(capsys):
    assert main(["experiments", "language", "compare"]) == 2
    assert "is now `python benchmarks/language_models.py`" in capsys.readouterr().err


def test_equal_steps_are_between_evaluations():
    slow = [{"step": 10, "bits_per_byte": 5.0}, {"step": 20, "bits_per_byte": 4.0}]
    fast = [{"step": 15, "bits_per_byte": 4.0}, {"step": 25, "bits_per_byte": 2.0}]
    found = language_models.equal_steps({"lambda": slow, "attention": fast})
    assert found == {"step": 20, "lambda": 4.0, "attention": 3.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lambda", "attention"])
def test_a_minute_on_the_standard_library_beats_counted_pairs(tmp_path, kind):
    config = LanguageConfig(
        out=tmp_path, model=ByteModelConfig(kind=kind, width=64, depth=2), epochs=0.15, evaluated=65536, device="cpu"
    )
    task = Language(config)
    result = fit(task, config)
    assert result.scores["ema"]["validation"]["bits_per_byte"] < bigram_bits(task.corpus, task.regions)
