"""Small valid files that cases damage, made once per worker."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.data.helpers import encoded as encode
from tests.data.helpers import picture


@cache
def place() -> Path:
    return Path(tempfile.mkdtemp(prefix="made-"))


@cache
def small_run() -> Path:
    """Write weights of a network with three classes for images of 12 pixels."""
    from tests.train.weights import small_weights

    return small_weights(place() / "small.safetensors", ("ant", "bee", "cat"))[1]


@cache
def picture_bytes(seed: int, kind: str = "JPEG") -> bytes:
    return encode(picture(seed, (16, 12)), kind)


SMALL = (
    *("depths=(1,1,1,1)", "widths=(4,4,8,8)", "stem='small'", "scope=3", "key_depth=4", "heads=2", "placement='CCLL'"),
)


@cache
def image_folder() -> Path:
    """Write two classes of five images."""
    from tests.train.weights import image_folder as write

    folder = place() / "images"
    write(folder, ("ant", "bee"), each=5)
    return folder


def empty_folder() -> Path:
    folder = place() / "nothing" / "here"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def small_config(out: Path) -> Any:
    """Return the configuration of a run of two steps."""
    from lambdanets.train.config import DataConfig, ModelConfig, TrainConfig

    return TrainConfig(
        out=out,
        model=ModelConfig(name="resnet26", image_size=12, options=SMALL),
        data=DataConfig(path=str(image_folder()), workers=0, crop=1.0),
        epochs=1.0,
        batch_size=4,
        log_every=1,
        device="cpu",
    )


@cache
def finished_run() -> Path:
    """Return the folder of a finished run."""
    import contextlib
    import io

    from lambdanets.train.command import train

    folder = place() / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(small_config(folder), report=False) == 0
    return folder


@cache
def model_folder() -> Path:
    """Return the folder that save_pretrained writes for the network of `small_run`."""
    from lambdanets.models.pretrained import from_pretrained, save_pretrained

    return save_pretrained(from_pretrained(small_run()), place() / "model")


@cache
def labels_folder() -> Path:
    """Return a folder of labels for 30 images in three units, with a selection."""
    from lambdanets.pseudo.select import Selection, select
    from tests.pseudo.made import label_all, make_files

    label_all(str(small_run()), make_files(place() / "unlabelled"), place() / "labels")
    select(place() / "labels", Selection(threshold=0.1))
    return place() / "labels"
