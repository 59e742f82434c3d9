"""The configuration of a run, which `lambdanets train resume` and `lambdanets evaluate` read."""

import json
import math
import shutil
from typing import Any

from tests.fuzz import damage
from tests.fuzz.case import Defect, FuzzCase, replaced, silent
from tests.fuzz.made import finished_run, image_folder, small_config

KEPT = ("log.jsonl", "weights.safetensors", "predictions.safetensors")


def run(case: FuzzCase) -> bool:
    from lambdanets.runs import as_stored

    draw = case.random
    data = as_stored(small_config(case.folder))
    said, where, changed = "nothing", (), data
    if case.number >= 3:
        said, where, changed = damage.spoilt(draw, data)
        case.note(f"{damage.dotted(where)} {said}")
    content = damage.as_bytes(changed)
    if case.number % 8 == 7:
        said, content = damage.damaged(draw, damage.as_bytes(data))
        case.note(said)
    (case.folder / "config.json").write_bytes(content)
    last = str(where[-1]) if where and isinstance(where[-1], str) else str(where[-2]) if len(where) > 1 else "config"
    keys = {str(key) for path in damage.places(data) for key in path if len(str(key)) > 3}
    names = ("config.json", "configuration", last, *keys, str(image_folder()), str(case.folder), "unknown model")
    if where and isinstance(value := damage.at(changed, where[:-1]), dict) and isinstance(value.get(where[-1]), str):
        names += (value[where[-1]][:20] or "an empty path",)

    accepted = resumed(case, content, names)
    if accepted is None and said == "nothing":
        raise silent("refused although it is whole")
    if case.number % 5 == 0:
        evaluated(case, names, said)
    return accepted is not None


def resumed(case: FuzzCase, content: bytes, names: tuple[str, ...]) -> Any:
    """Return the configuration that `train resume` would train with, or None if it refuses the file."""
    from lambdanets.runs import as_stored
    from lambdanets.train import loop
    from lambdanets.train.command import Resume, Train
    from lambdanets.train.schedule import learning_rate

    reached: list[Any] = []

    def engine(task: Any, config: Any, world: Any, steps: int) -> None:
        """Replaces the start of training."""
        if steps >= 2**53:
            raise silent(f"a run of {steps} steps")
        for step in (0, steps // 2, steps - 1):
            rate = learning_rate(config.schedule, config.batch_size, step, steps=steps, steps_per_epoch=2)
            if not math.isfinite(rate):
                raise silent(f"the learning rate of step {step} is {rate}")
        task.model()
        reached.append(config)
        raise OSError("config.json: training would start now")

    with replaced(loop, "Engine", engine):
        found = case.command(Train(recipe=Resume(case.folder), report=False), names=names)
    assert found.refused, found
    if not reached:
        return None
    try:
        given = json.loads(content)
    except ValueError:
        raise silent("of a file that is not JSON") from None
    wrong = difference(given, as_stored(reached[0]))
    if wrong:
        raise silent(wrong)
    return reached[0]


def difference(given: Any, read: Any, where: str = "") -> str:
    """Return how the first setting was read differently from the file, or ""; missing settings have defaults."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            if key not in read:
                return f"{where}{key} is ignored"
            if (wrong := difference(value, read[key], f"{where}{key}.")) and where + key != "out":
                return wrong
        return ""
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return next((d for a, b in zip(given, read, strict=True) if (d := difference(a, b, where))), "")
    same = given == read and (type(given) is type(read) or (type(given) is int and type(read) is float))
    return "" if same else f"{where} is {str(given)[:40]} in the file and was read as {str(read)[:40]}"


def evaluated(case: FuzzCase, names: tuple[str, ...], said: str) -> None:
    """Check that `evaluate` reads the same file in the same way."""
    from lambdanets.train.inference.command import Evaluate, Using

    for name in KEPT:
        shutil.copy(finished_run() / name, case.folder / name)
    found = case.command(Evaluate(str(case.folder), using=Using(device="cpu", workers=0), json=True), names=names)
    if found.refused:
        if said == "nothing":
            raise silent("`evaluate` refuses what is whole")
        return
    scores = json.loads(found.out)
    if not 0 <= scores["top1"] <= 1:
        raise Defect(f"top-1 of {scores['top1']}")
