"""Measurements that take no time."""

from dataclasses import asdict

import pytest

from lambdanets.bench.throughput import Throughput
from lambdanets.experiments.reproduce import jobs
from lambdanets.experiments.reproduce.jobs import GrowthJob, NetworkJob, Settings
from lambdanets.experiments.reproduce.pareto import published


def throughput(seconds: float, batch: int = 2) -> Throughput:
    return Throughput(batch, seconds, batch / seconds, seconds * 1024 / batch, 3, None, 3 * 2**30, batch, 0, None)


@pytest.fixture
def measured(monkeypatch):
    """Networks are not run: every job notes its key. EfficientNets take 3 times as long as others as accurate."""
    done: list[str] = []
    times = {
        (one.network, one.image_size): (3.0 if one.family == "EfficientNet" else 1.0) * 2 ** (one.top1 - 80)
        for one in published()
    }

    def run(job: NetworkJob | GrowthJob, settings: Settings):
        done.append(job.key(settings))
        if isinstance(job, GrowthJob):
            return {"seconds": 3.0, "bytes": 2.0, "base_seconds": 1.0, "base_bytes": 8}
        if "global_attention" in job.network:
            return {"error": jobs.OUT_OF_MEMORY}
        about = {"parameters": 1, "asked_batch": 8, "image_size": job.size(settings), "fold": True}
        return {**asdict(throughput(times.get((job.network, job.image_size), 1.0))), **about}

    monkeypatch.setattr(NetworkJob, "run", run)
    monkeypatch.setattr(GrowthJob, "run", run)
    return done
