"""The loop: resume to the last bit, steps that are undone, memory that ends, accumulation that changes nothing."""

import hashlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from lambdanets.train import checkpoint, loop, memory
from lambdanets.train.checkpoint import complete
from lambdanets.train.config import Ema, Optimizer, Schedule
from lambdanets.train.engine import seed_all
from lambdanets.train.loop import fit
from lambdanets.train.nonfinite import NotFiniteError
from lambdanets.train.task import Share
from tests.train.tasks import EXAMPLES, Numbers, StopAt, config, final, records, same

every_kind = pytest.mark.parametrize("kind", get_args(get_type_hints(Optimizer)["kind"]))


def test_training_learns_and_leaves_a_run(tmp_path):
    result = fit(Numbers(), config(tmp_path, epochs=30.0))
    assert result.finished
    assert result.step == result.steps == 30 * (EXAMPLES // 16)
    assert result.scores["ema"]["held_out"]["top1"] > 0.85
    events = [record["event"] for record in records(tmp_path)]
    assert events[0] == "start"
    assert events[-1] == "end"
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 16
    steps = records(tmp_path, "step")
    assert [r["step"] for r in steps] == list(range(5, 181, 5))
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert not signal.getsignal(signal.SIGTERM) or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_loop_is_the_textbook_update(tmp_path):
    """Weights after three steps, against SGD written out by hand."""
    task = Numbers(norm=False, dropout=0.0)
    settings = config(tmp_path, epochs=0.5, clip_norm=0.3)
    fit(task, settings)
    found = final(tmp_path)

    seed_all(settings.seed)
    model = task.model().double()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    average = [p.detach().clone() for p in model.parameters()]
    for step, batch in zip(range(3), task.batches(0, 0, Share(0, 1, 16, 1)), strict=False):
        gradients = torch.autograd.grad(task.loss(model, batch).loss, list(model.parameters()))
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))
        gradients = [g * min(1.0, 0.3 / (float(norm) + 1e-6)) for g in gradients]
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                velocity[i] = 0.9 * velocity[i] + gradients[i] + (1e-3 * p if p.ndim > 1 else 0)
                p -= 0.2 * step / 6 * velocity[i]
                decay = min(0.9, (1 + step) / (10 + step), 0.0)  # the horizon of a run of 3 steps is nothing
                average[i] += (1 - decay) * (p - average[i])
    for (name, p), mean in zip(model.named_parameters(), average, strict=True):
        torch.testing.assert_close(found[f"raw.{name}"], p.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found[f"ema.{name}"], mean, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@every_kind
def test_a_run_that_stops_and_resumes_is_the_run_that_did_not(tmp_path, kind, precision):
    settings = dict(precision=precision, optimizer=Optimizer(kind=kind), schedule=Schedule(rate=0.01, per_batch=0))
    whole = tmp_path / "whole"
    fit(Numbers(), config(whole, **settings))
    parts = tmp_path / "parts"
    first = fit(Numbers(), config(parts, **settings), watch=StopAt(10))
    assert (first.stopped_by, first.step) == ("SIGTERM", 10)
    second = fit(Numbers(), config(parts, **settings), resume=True, watch=StopAt(15, signal.SIGUSR1))
    assert (second.stopped_by, second.step) == ("SIGUSR1", 15)
    last = fit(Numbers(), config(parts, **settings), resume=True)
    assert last.finished
    assert same(final(whole), final(parts))
    curve = [(r["step"], r["loss"], r["top1"], r["grad_norm"], r["lr"]) for r in records(whole, "step")]
    assert curve == [(r["step"], r["loss"], r["top1"], r["grad_norm"], r["lr"]) for r in records(parts, "step")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_at_once(tmp_path, number, capfd):
    """Before the step in progress is done, which may take minutes."""
    said = []

    class Listening(Numbers):
        def loss(self, model, batch):
            if len(self.seen) == 3 and not said:
                signal.raise_signal(number)
                said.append(capfd.readouterr().err)
            return super().loss(model, batch)

    assert fit(Listening(), config(tmp_path)).step == 3
    assert f"{number.name}: stopping after this step" in said[0]
    assert ("press Ctrl-C again to stop immediately" in said[0]) == (number == signal.SIGINT)


def test_a_signal_in_one_long_operation_is_answered_at_once(tmp_path, capfd):
    """Such as a backward pass on a CPU, during which Python runs no signal handlers."""
    said, ended = [], []

    def interrupt():
        for words in ("stopping after this step", "stopping without a checkpoint"):
            time.sleep(0.1)
            if ended:
                return
            os.kill(os.getpid(), signal.SIGINT)
            errors = ""
            while words not in errors and not ended:
                errors += capfd.readouterr().err
                time.sleep(0.01)
            said.append(time.monotonic())

    other = threading.Thread(target=interrupt)

    class Slow(Numbers):
        def loss(self, model, batch):
            other.start()
            try:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 8_000_000)  # seconds in one call, without the GIL
            finally:
                ended.append(time.monotonic())
                other.join()
            raise AssertionError("the step went on")

    with pytest.raises(KeyboardInterrupt):
        fit(Slow(), config(tmp_path))
    assert len(said) == 2
    assert said[1] < ended[0] - 0.2


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    class Twice(Numbers):
        def loss(self, model, batch):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("the step went on")

    with pytest.raises(KeyboardInterrupt):
        fit(Twice(), config(tmp_path))


def test_an_epoch_that_carries_its_remainder_trains_on_every_example_once(tmp_path):
    task, settings = Numbers(), config(tmp_path / "whole", batch_size=20, remainder="carry", epochs=5.0, log_every=3)
    result = fit(task, settings)
    assert (EXAMPLES, result.steps) == (96, 24)
    trained = [number for _, chosen in task.seen for number in chosen]
    assert [step for step, _ in task.seen] == list(range(24))
    for epoch in range(5):
        assert sorted(trained[epoch * EXAMPLES : (epoch + 1) * EXAMPLES]) == list(range(EXAMPLES))
    assert [r["step"] for r in records(tmp_path / "whole", "evaluation")] == [5, 10, 15, 20, 24, 24]
    assert [r["epoch"] for r in records(tmp_path / "whole", "step")] == [20 * step / 96 for step in range(3, 25, 3)]
    (start,) = records(tmp_path / "whole", "start")
    assert start["steps_per_epoch"] == 4.8
    assert "An epoch has 4.8 steps" in start["note"]
    for step in (4, 5, 23):  # before, at and after the ends of epochs
        part, again = replace(settings, out=tmp_path / str(step)), Numbers()
        assert fit(Numbers(), part, watch=StopAt(step, event="tick")).step == step
        fit(again, part, resume=True)
        assert again.seen == task.seen[step:]
        assert same(final(tmp_path / "whole"), final(part.out))


def test_a_run_from_before_remainders_were_carried_keeps_its_steps(tmp_path):
    """Its configuration and checkpoints do not mention the remainder, and the recipe carries it by now."""
    settings = config(tmp_path / "old", batch_size=20)
    fit(Numbers(), config(tmp_path / "whole", batch_size=20))
    fit(Numbers(), settings, watch=StopAt(5))
    path = settings.out / "config.json"
    data = json.loads(path.read_text())
    assert data.pop("remainder") == "drop"
    path.write_text(json.dumps(data))
    (newest,) = complete(settings.out / "checkpoints")
    state = torch.load(newest, weights_only=True)
    assert state.pop("remainder") == "drop"
    newest.unlink()
    checkpoint.save(state, settings.out / "checkpoints", 5)
    result = fit(Numbers(), replace(settings, remainder="carry"), resume=True)
    assert result.steps == 16
    assert same(final(tmp_path / "whole"), final(settings.out))


def test_a_run_is_not_resumed_with_another_remainder(tmp_path):
    settings = config(tmp_path, batch_size=20)
    fit(Numbers(), settings, watch=StopAt(5))
    with pytest.raises(ValueError, match="remainder was 'drop' and is 'carry'"):
        fit(Numbers(), replace(settings, remainder="carry"), resume=True)


def test_a_checkpoint_between_two_log_lines_keeps_the_sums(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(Numbers(spoilt={7}), config(whole))
    monkeypatch.setattr(loop.TrainingRun, "save_or_stop", lambda run: run.step == 8 and (run.save_checkpoint() or True))
    assert fit(Numbers(spoilt={7}), config(parts)).step == 8
    monkeypatch.undo()
    fit(Numbers(spoilt={7}), config(parts), resume=True)
    for event, names in (("step", ("step", "loss", "top1", "grad_norm")), ("skipped_step", ("step",))):
        assert [[r[n] for n in names] for r in records(whole, event)] == [
            [r[n] for n in names] for r in records(parts, event)
        ]
    assert same(final(whole), final(parts))


@pytest.mark.parametrize("ema", [Ema(decay=0.9), Ema(decay=0.0)])
def test_a_step_that_is_not_finite_is_undone_with_its_buffers(tmp_path, ema, monkeypatch):
    """Equal to a run in which that step does nothing at all."""
    spoilt, without = tmp_path / "spoilt", tmp_path / "without"
    result = fit(Numbers(spoilt={0, 9}), config(spoilt, ema=ema))
    assert result.skipped == 2
    assert [r["step"] for r in records(spoilt, "skipped_step")] == [0, 9]
    assert all(t.isfinite().all() for t in final(spoilt).values())
    step = loop.Engine.step

    def left_out(engine, number, batches, share, rate):
        if number in (0, 9):
            return next(batches)
        return step(engine, number, batches, share, rate)

    monkeypatch.setattr(loop.Engine, "step", left_out)
    fit(Numbers(), config(without, ema=ema))
    assert same(final(spoilt), final(without))
    losses = [r["loss"] for r in records(spoilt, "step")]
    assert all(loss is not None for loss in losses)


class Masked(Numbers):
    """Its network has constants that are not finite."""

    def model(self):
        model = super().model()
        model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1).to(torch.float64))
        model.register_buffer("unknown", torch.tensor([float("nan"), 0.1], dtype=torch.float64))
        return model


@pytest.mark.parametrize("micro_batch", [16, 4])
def test_constants_that_are_not_finite_are_no_reason_to_skip_a_step(tmp_path, micro_batch):
    masked, without = tmp_path / "masked", tmp_path / "without"
    result = fit(Masked(spoilt={0, 9}), config(masked, micro_batch=micro_batch))
    assert result.skipped == 2
    assert [r["step"] for r in records(masked, "skipped_step")] == [0, 9]
    fit(Numbers(spoilt={0, 9}), config(without, micro_batch=micro_batch))
    found = final(masked)
    constants = {
        f"{which}.{name}": found.pop(f"{which}.{name}") for which in ("ema", "raw") for name in ("mask", "unknown")
    }
    assert same(found, final(without))
    start = Masked().model().state_dict()
    for name, value in constants.items():
        torch.testing.assert_close(value, start[name[4:]], rtol=0, atol=0, equal_nan=True)


@every_kind
def test_steps_that_stay_not_finite_end_the_run_with_a_diagnosis(tmp_path, kind):
    settings = config(tmp_path, max_skipped=8, optimizer=Optimizer(kind=kind), schedule=Schedule(rate=0.01))
    with pytest.raises(NotFiniteError, match=r"10 consecutive steps up to step 15.*weights are finite.*check the data"):
        fit(Numbers(spoilt=range(5, 100)), settings)
    assert "check the data" in records(tmp_path, "end")[0]["reason"]


@pytest.mark.parametrize("micro_batch", [8, 4])
def test_accumulation_without_batch_norm_changes_nothing(tmp_path, micro_batch):
    one, several = tmp_path / "one", tmp_path / "several"
    fit(Numbers(norm=False, dropout=0.0), config(one))
    fit(Numbers(norm=False, dropout=0.0), config(several, micro_batch=micro_batch))
    for name, tensor in final(one).items():
        torch.testing.assert_close(final(several)[name], tensor, rtol=0, atol=1e-10)


def test_accumulation_updates_running_statistics_once_a_step(tmp_path):
    fit(Numbers(dropout=0.0), config(tmp_path, epochs=1 / 6, micro_batch=4, schedule=Schedule(warmup_epochs=1.0)))
    found = final(tmp_path)  # one step, at a learning rate of 0
    task = Numbers(dropout=0.0)
    seed_all(0)
    model = task.model().double()
    means = [model[0](inputs).mean(0) for inputs, _ in task.batches(0, 0, Share(0, 1, 4, 4))][:4]
    torch.testing.assert_close(found["raw.1.running_mean"], 0.1 * torch.stack(means).mean(0))
    assert found["raw.1.num_batches_tracked"] == 1


def test_memory_that_ends_becomes_accumulation(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROBED", ("cpu",))
    small, asked = tmp_path / "small", tmp_path / "asked"
    fit(Numbers(room=5), config(small))
    start = records(small, "start")[0]
    assert (start["micro_batch"], start["accumulation"]) == (4, 4)
    assert start["note"] == "Batch norm uses micro-batches of 4"
    monkeypatch.undo()
    fit(Numbers(), config(asked, micro_batch=4))
    assert same(final(small), final(asked))


@pytest.mark.parametrize(
    ("momentum", "epochs", "words"),
    [
        (0.01, 4.0, ["momentum of 0.01 is too small for 24 steps", "Use 0.1"]),
        (0.1, 1.5, []),  # 9 steps are too few for 0.1, and there is nothing better to advise
        (0.1, 1.0, ["warmup takes 1 epochs and the run 1", "--schedule.warmup-epochs"]),
    ],
)
def test_notes_at_the_start(tmp_path, momentum, epochs, words):
    task = Numbers()
    make = task.model

    def model():
        network = make()
        network[1].momentum = momentum
        return network

    task.model = model
    fit(task, config(tmp_path, epochs=epochs))
    note = records(tmp_path, "start")[0]["note"]
    assert all(word in note for word in words)
    assert bool(note) == bool(words)


def test_not_even_one_example_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PROBED", ("cpu",))
    with pytest.raises(ValueError, match="not even one image"):
        fit(Numbers(room=0), config(tmp_path))


def test_float16_finds_its_scale(tmp_path):
    """The first steps overflow and are skipped; then it learns."""
    result = fit(Numbers(dropout=0.0), config(tmp_path, precision="float16", epochs=20.0))
    assert all(t.isfinite().all() for t in final(tmp_path).values())
    assert result.scores["raw"]["held_out"]["top1"] > 0.8


def test_early_stopping_keeps_the_best_weights(tmp_path, monkeypatch):
    scores = iter([0.5, 0.7, 0.6, 0.7, 0.4, 0.1, 0.1])
    weights = []

    def evaluate(self, model, world, final):
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {"held_out": {"top1": 0.0 if final else next(scores)}}

    monkeypatch.setattr(Numbers, "evaluate", evaluate)
    result = fit(Numbers(), config(tmp_path, epochs=50.0, early_stopping=3))
    assert result.step == 5 * 6
    assert "step 12" in records(tmp_path, "end")[0]["reason"]
    kept = {name.removeprefix("ema."): t for name, t in final(tmp_path).items() if name.startswith("ema.")}
    assert same(kept, weights[1])
    assert not same(kept, weights[3])


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    fit(Numbers(), config(tmp_path, epochs=1.0))
    with pytest.raises(ValueError, match="already holds a run: resume it with --resume"):
        fit(Numbers(), config(tmp_path, epochs=1.0))
    with pytest.raises(ValueError, match=r"cannot be resumed, because epochs was 1.0 and is 2.0"):
        fit(Numbers(), config(tmp_path, epochs=2.0), resume=True)


def test_resuming_a_finished_run_gives_its_result_again(tmp_path):
    one = fit(Numbers(), config(tmp_path))
    before = final(tmp_path)
    again = fit(Numbers(), config(tmp_path), resume=True)
    assert again.scores == one.scores
    assert same(before, final(tmp_path))


def test_resume_without_checkpoints_starts(tmp_path):
    assert fit(Numbers(), config(tmp_path, epochs=1.0), resume=True).finished


def test_a_damaged_newest_checkpoint_falls_back_and_says_so(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(Numbers(), config(whole))
    settings = config(parts, checkpoint_minutes=0.0)
    fit(Numbers(), settings, watch=StopAt(15))
    *_, before, newest = complete(parts / "checkpoints")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    fit(Numbers(), settings, resume=True)
    resumed = records(parts, "resumed")[0]
    assert resumed["path"] == before.name
    assert newest.name in resumed["note"]
    assert "damaged" in resumed["note"]
    assert newest.with_name(newest.name + ".damaged").exists()
    assert same(final(whole), final(parts))


def test_a_full_disk_keeps_the_last_good_checkpoint_and_the_run(tmp_path, monkeypatch):
    settings = config(tmp_path, checkpoint_minutes=0.0)
    put, full = checkpoint.put, []

    def failing(state, folder, step, write):
        def half(state, file):
            file.write(b"x" * 1000)
            raise OSError(28, "No space left on device")

        if step > 10:
            full.append(step)
        return put(state, folder, step, half if step > 10 else write)

    monkeypatch.setattr(checkpoint, "put", failing)
    assert fit(Numbers(), settings).finished
    assert full
    failed = records(tmp_path, "checkpoint_failed")
    assert "No space left" in failed[0]["reason"]
    assert [path.name[:14] for path in complete(tmp_path / "checkpoints")] == ["step-000000010"]
    assert not list((tmp_path / "checkpoints").glob("*.part"))
    before = final(tmp_path)
    monkeypatch.undo()
    assert fit(Numbers(), settings, resume=True).finished
    assert records(tmp_path, "resumed")[0]["step"] == 10
    assert same(before, final(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(batch_size=97), "96 training images are too few for batch size 97: use --batch-size 96 or less"),
        (dict(sync_batch_norm=True), "sync_batch_norm needs GPUs"),
        (dict(micro_batch=5), "16 images per process are not divisible into micro-batches of 5: use micro_batch 4"),
    ],
)
def test_refusals(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        fit(Numbers(), config(tmp_path, **changes))


@pytest.mark.parametrize("early_stopping", [0, 3])
def test_statistics_of_averaged_weights_are_those_of_training_batches(tmp_path, early_stopping):
    def settings(name, **ema):
        return config(tmp_path / name, ema=Ema(decay=0.9, **ema), micro_batch=8, early_stopping=early_stopping)

    plain, task = settings("plain"), Numbers(dropout=0.0)
    fit(Numbers(dropout=0.0), plain)
    fit(task, settings("whole", recalibrate=5))
    before, found = final(plain.out), final(tmp_path / "whole")
    if not early_stopping:
        weights = [name for name in found if "running" not in name and "tracked" not in name]
        assert same({n: before[n] for n in weights}, {n: found[n] for n in weights})
        assert same({n: t for n, t in before.items() if "raw" in n}, {n: t for n, t in found.items() if "raw" in n})
    batches = task.batches(3, 0, Share(0, 1, 8, 2))
    hidden = [x @ found["ema.0.weight"].T + found["ema.0.bias"] for x, _ in (next(batches) for _ in range(5))]
    torch.testing.assert_close(found["ema.1.running_mean"], torch.stack([h.mean(0) for h in hidden]).mean(0))
    torch.testing.assert_close(found["ema.1.running_var"], torch.stack([h.var(0) for h in hidden]).mean(0))
    assert not torch.equal(found["ema.1.running_mean"], before["ema.1.running_mean"])
    for step in (6, 9, 24):  # at an evaluation, between two of them, and before the last
        parts = settings(f"parts{step}", recalibrate=5)
        fit(Numbers(dropout=0.0), parts, watch=StopAt(step, event="tick"))
        fit(Numbers(dropout=0.0), parts, resume=True)
        assert same(found, final(parts.out))
