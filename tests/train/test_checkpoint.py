"""Checkpoints are there or not: names, damage, leftovers, full disks."""

import pytest
import torch

from lambdanets.train import checkpoint
from lambdanets.train.checkpoint import complete, load_newest, save


def steps(folder):
    return [int(path.name.split("-")[1]) for path in complete(folder)]


def test_the_last_ones_are_kept(tmp_path):
    for step in (5, 100, 20):
        save({"step": step}, tmp_path, step, keep=2)
    assert steps(tmp_path) == [20, 100]
    assert load_newest(tmp_path).state == {"step": 100}
    save({"step": 101}, tmp_path, 101, keep=1)
    assert steps(tmp_path) == [101]


def test_nothing_is_none(tmp_path):
    assert load_newest(tmp_path / "missing") is None
    (tmp_path / "step-1.pt").write_bytes(b"not one of ours")
    assert load_newest(tmp_path) is None


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "other"])
def test_a_damaged_one_is_passed_over_and_named(tmp_path, damage):
    save({"weights": torch.arange(1000.0)}, tmp_path, 1)
    newest = save({"weights": torch.arange(1000.0) + 1}, tmp_path, 2)
    data = bytearray(newest.read_bytes())
    data[700] ^= 16
    newest.write_bytes({"cut": data[:-100], "bit": data, "empty": b"", "other": b"\x80\x04garbage"}[damage])
    found = load_newest(tmp_path)
    assert found.state["weights"][0] == 0
    assert newest.name in found.damaged[0]
    assert steps(tmp_path) == [1]  # it does not count among those that are kept
    assert newest.with_name(newest.name + ".damaged").exists()
    for path in complete(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is usable"):
        load_newest(tmp_path)
    with pytest.raises(ValueError, match="is usable"):  # nor is it a new run the second time
        load_newest(tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_checkpoint_cannot_run_code(tmp_path, capsys):
    """Its name fits its contents: only weights_only stands in the way."""
    save({"step": 1}, tmp_path, 1)
    evil = save({"step": Evil()}, tmp_path, 2)
    found = load_newest(tmp_path)
    assert found.state == {"step": 1}
    assert evil.name in found.damaged[0]
    assert "must not run" not in capsys.readouterr().out


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / "step-000000003.part").write_bytes(b"half")
    save({"step": 4}, tmp_path, 4)
    assert [path.suffix for path in tmp_path.iterdir()] == [".pt"]


def failing(times):
    """A writer for a disk that is full for the first `times`."""
    tries = []

    def write(state, file):
        tries.append(state)
        file.write(b"x" * 100)
        if len(tries) <= times:
            raise OSError(28, "No space left on device")
        torch.save(state, file)

    return write


def test_a_full_disk_makes_room_from_older_ones_but_never_the_newest(tmp_path):
    for step in (1, 2, 3):
        save({"step": step}, tmp_path, step, keep=3)
    with pytest.raises(OSError, match="No space left"):
        save({"step": 4}, tmp_path, 4, keep=3, write=failing(2))
    assert steps(tmp_path) == [3]
    with pytest.raises(OSError, match="No space left"):  # now there is nothing to give
        save({"step": 4}, tmp_path, 4, keep=3, write=failing(1))
    assert steps(tmp_path) == [3]
    assert load_newest(tmp_path).state == {"step": 3}
    assert not list(tmp_path.glob(f"*{checkpoint.PART}"))


def test_a_full_disk_keeps_the_newest_whole_one_and_no_damaged_one(tmp_path):
    good = save({"step": 10}, tmp_path, 10)
    garbage = tmp_path / "step-000000020-0123456789abcdef.pt"
    garbage.write_bytes(b"garbage")
    aside = tmp_path / "step-000000019-0123456789abcdef.pt.damaged"
    aside.write_bytes(b"garbage")
    with pytest.raises(OSError, match="No space left"):
        save({"step": 15}, tmp_path, 15, write=failing(2))
    assert list(tmp_path.iterdir()) == [good]
    assert load_newest(tmp_path).state == {"step": 10}


def test_a_full_disk_takes_nothing_where_nothing_is_whole(tmp_path):
    garbage = [tmp_path / f"step-00000000{step}-0123456789abcdef.pt" for step in (1, 2)]
    for path in garbage:
        path.write_bytes(b"garbage")
    with pytest.raises(OSError, match="No space left"):
        save({"step": 15}, tmp_path, 15, write=failing(1))
    assert complete(tmp_path) == garbage


def test_torchs_own_writer_error_is_an_oserror(tmp_path):
    def write(state, file):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    with pytest.raises(OSError, match="cannot be written: PytorchStreamWriter"):
        save({}, tmp_path, 1, write=write)
