"""Several processes: equal to one, together in what they skip, and finished though one of them is killed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from lambdanets.train.loop import fit
from tests.support.programs import ROOT, environment
from tests.train.tasks import Numbers, config, final, records


def torchrun(out, processes, *, launcher=("--standalone",), check=True, timeout=240, **settings):
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, f"--nproc-per-node={processes}"]
    command += ["-m", "tests.train.program", str(out), json.dumps(settings)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0 or not check, done.stderr[-3000:]
    return done


def close(one, other, tolerance=1e-10):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"batch_size": 20, "remainder": "carry"}])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_without_batch_norm_are_one_process(tmp_path, processes, settings):
    fit(Numbers(norm=False, dropout=0.0), config(tmp_path / "one", **settings))
    torchrun(tmp_path / "several", processes, norm=False, dropout=0.0, **settings)
    close(final(tmp_path / "one"), final(tmp_path / "several"))
    one, several = (records(tmp_path / name, "step") for name in ("one", "several"))
    assert [r["step"] for r in one] == [r["step"] for r in several]
    for a, b in zip(one, several, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)
        assert a["top1"] == pytest.approx(b["top1"], abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_with_batch_norm_and_dropout_are_one_that_takes_statistics_per_shard(tmp_path, processes):
    """Running statistics and the random numbers of dropout included."""
    fit(Numbers(), config(tmp_path / "one", micro_batch=4))
    torchrun(tmp_path / "several", processes, micro_batch=4)
    close(final(tmp_path / "one"), final(tmp_path / "several"))
    fit(Numbers(), config(tmp_path / "whole"))  # and it does matter who takes the statistics
    with pytest.raises(AssertionError):
        close(final(tmp_path / "one"), final(tmp_path / "whole"))


@pytest.mark.slow
def test_a_batch_that_is_not_finite_on_one_process_is_skipped_by_all(tmp_path):
    torchrun(tmp_path / "several", 2, spoilt=[4, 11], spoilt_rank=1, micro_batch=8)
    assert [r["step"] for r in records(tmp_path / "several", "skipped_step")] == [4, 11]
    fit(SpoiltHalf(), config(tmp_path / "one", micro_batch=8))
    close(final(tmp_path / "one"), final(tmp_path / "several"))


class SpoiltHalf(Numbers):
    """One process, whose second micro-batch of a step holds the NaN, as the second process's does."""

    def batches(self, epoch, first_step, share):
        for number, (inputs, labels) in enumerate(super().batches(epoch, first_step, share)):
            if epoch * 6 + first_step + number // share.parts in (4, 11) and number % share.parts == 1:
                inputs[0, 0] = float("nan")
            yield inputs, labels


@pytest.mark.slow
def test_an_elastic_run_whose_worker_is_killed_finishes(tmp_path):
    """torchrun starts the processes again; they go on from the last checkpoint, to the same weights."""
    torchrun(tmp_path / "whole", 2)
    launcher = ("--standalone", "--max-restarts=2", "--monitor-interval=0.1")
    torchrun(tmp_path / "killed", 2, launcher=launcher, crash=str(tmp_path / "crash"), checkpoint_minutes=0.0)
    assert (tmp_path / "crash").exists()
    resumed = records(tmp_path / "killed", "resumed")
    assert len(resumed) == 1
    assert resumed[0]["step"] >= 12
    close(final(tmp_path / "whole"), final(tmp_path / "killed"), 0.0)


def ranks(out, **settings):
    """Two processes without torchrun, which would end one with the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.train.program", str(out), json.dumps(settings)]
    variables = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return [
        subprocess.Popen(command, cwd=ROOT, env=variables | {"RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "words"),
    [({"seed": 3}, "seed 3 and rank 0 has 0"), ({"batch_size": 200}, "batch_size 200 and rank 0 has 16")],
    ids=["seed", "too_large_a_batch"],
)
def test_ranks_with_other_settings_all_end_with_a_sentence(tmp_path, other, words):
    processes = ranks(tmp_path / "run", of_ranks={"1": other})
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2
        assert f"rank 1 has {words}: start all of them with the same settings" in errors
        assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SIGKILL", "the connection to another process of this run was lost"),
        ("SIGSTOP", r"another process of this run did not respond for 0\.4 minutes \(--timeout-minutes\)"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_ends_the_run_with_a_sentence(tmp_path, name, words):
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = dict(checkpoint_minutes=0.0, timeout_minutes=0.4)  # also for the start of both
    main, other = ranks(run, crash=str(tmp_path / "crash"), signal=name, **settings)
    try:
        _, errors = main.communicate(timeout=120)
    finally:
        other.kill()
        other.communicate()
    assert main.returncode == 2, errors
    assert re.search(words, errors)
    assert f"The run in {run} resumes from its last checkpoint" in errors
    assert "Traceback" not in errors
    assert re.search(words, records(run, "end")[0]["reason"])
    for out in (whole, run):
        for process in ranks(out, resume=True):
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    close(final(whole), final(run), 0.0)


@pytest.mark.slow
def test_sigterm_to_torchrun_is_one_checkpoint_of_all(tmp_path):
    settings = json.dumps({"epochs": 5000.0, "log_every": 4})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.train.program", str(tmp_path / "run"), settings]
    started = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
    log = tmp_path / "run" / "log.jsonl"
    while started.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= 3):
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=60)
    (end,) = records(tmp_path / "run", "end")
    assert "stopped by SIGTERM" in end["reason"]
    (saved,) = records(tmp_path / "run", "checkpoint")
    assert saved["step"] == end["step"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    fit(Numbers(), config(tmp_path / "one", micro_batch=4))
    torchrun(tmp_path / "several", 4, micro_batch=4, crash=str(tmp_path / "crash"), checkpoint_minutes=0.0, check=False)
    torchrun(tmp_path / "several", 2, micro_batch=4, resume=True)
    close(final(tmp_path / "one"), final(tmp_path / "several"))


def namespaces_work():
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    probe = f"lambdanets-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return made


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them."""
    if not namespaces_work():
        pytest.skip("network namespaces need `ip` and root")
    one, two = names = [f"ln{os.getpid()}{letter}" for letter in "ab"]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"{one}v", "netns", one, "type", "veth", "peer", "name", f"{two}v", "netns", two)
        for name, address in zip(names, ("10.77.0.1", "10.77.0.2"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"{name}v")
            ip("-n", name, "link", "set", f"{name}v", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_two_hosts_train_together(tmp_path, two_hosts):
    fit(Numbers(), config(tmp_path / "one", micro_batch=4))
    started = []
    for rank, host in enumerate(two_hosts):
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--node-rank={rank}", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--master-port=29511"]
        command += [f"--local-addr=10.77.0.{rank + 1}"]
        folder = tmp_path / ("several" if rank == 0 else "elsewhere")  # the second machine sees no shared disk
        command += ["-m", "tests.train.program", str(folder), json.dumps({"micro_batch": 4})]
        variables = environment() | {"GLOO_SOCKET_IFNAME": f"{host}v", "TP_SOCKET_IFNAME": f"{host}v"}
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    for process in started:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
    assert not (tmp_path / "elsewhere").exists()
    close(final(tmp_path / "one"), final(tmp_path / "several"))
