"""Copies and indices of shards go into the test's own folder."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAMBDANETS_CACHE", str(tmp_path_factory.mktemp("cache")))
