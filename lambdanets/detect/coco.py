"""Detection datasets: finding and opening annotations and images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lambdanets.data.shards import SHARDS
from lambdanets.data.source import SPLITS, NoSplitError, place_of
from lambdanets.detect import shapes
from lambdanets.detect.annotations import Masks, read_scenes
from lambdanets.detect.images import ImageFiles, open_images
from lambdanets.detect.scenes import Category, Scenes

LAYOUTS = (  # paths of annotation files; {} is the name of a split, such as "train" or "val"
    "instances_{}*.json",
    "annotations/instances_{}*.json",
    "{}.json",
    "annotations/{}*.json",
    "{}/_annotations.coco.json",
    "{}/*.json",
)
FOLDERS = ("{}", "{}20*", "images/{}", "images/{}20*", "images")  # of images


@dataclass(frozen=True, eq=False)
class DetectionSet:
    """Annotated images, as a data source of the loader.

    Attributes:
        scenes: the annotations.
        files: reads the images by name.

    >>> from lambdanets.detect.coco import open_set
    >>> data = open_set("shapes")
    >>> len(data), data.class_names
    (64, ('circle', 'square', 'triangle'))
    >>> pixels = data.read(0)  # uint8 [H, W, 3], or the bytes of an image file
    """

    scenes: Scenes
    files: ImageFiles | shapes.Shapes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; label i is class_names[i - 1]."""
        return self.scenes.class_names

    @property
    def labels(self) -> np.ndarray:
        """-1 for each image: images have no single class."""
        return np.full(len(self.scenes), -1, np.int64)

    def __len__(self) -> int:
        return len(self.scenes)

    def name(self, index: int) -> str:
        """Return the file name of an image."""
        return self.scenes.pictures[index].name

    def read(self, index: int) -> bytes | np.ndarray:
        """Return an image: the contents of its file, or pixels uint8 [H, W, 3]."""
        return self.files.read(self.scenes.pictures[index].name)


def open_set(
    where: str,
    split: str = "train",
    *,
    images: str | None = None,
    masks: Masks = "auto",
    categories: Sequence[Category] = (),
) -> DetectionSet:
    """Open a split of a detection dataset. Invalid entries are skipped; `scenes.problems` lists them.

    Args:
        where: "shapes" (synthetic, nothing to download), a COCO file, or a folder. A folder has
            instances_train.json and train.tar or train/, annotations/instances_train2017.json and train2017/, or
            train/_annotations.coco.json next to the images.
        split: "train", "validation" or "test".
        images: a folder or tar of images, if they are not where `where` has them.
        masks: whether every object needs a mask; "auto": yes if more than half of the objects have one.
        categories: the classes of the training set, to use in this order; by default those of the file.

    >>> import json
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from lambdanets.detect.coco import open_set
    >>> Path("cells/train").mkdir(parents=True)
    >>> Image.new("RGB", (64, 48)).save("cells/train/a.png")
    >>> coco = {
    ...     "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 48}],
    ...     "categories": [{"id": 7, "name": "nucleus"}],
    ...     "annotations": [
    ...         {"id": 1, "image_id": 1, "category_id": 7, "bbox": [10, 10, 20, 15]},
    ...         {"id": 2, "image_id": 1, "category_id": 7, "bbox": [10, 10, -5, 15]},
    ...     ],
    ... }
    >>> _ = Path("cells/instances_train.json").write_text(json.dumps(coco))
    >>> data = open_set("cells", "train")
    >>> data.scenes.pictures[0].boxes_N4
    array([[10., 10., 30., 25.]], dtype=float32)
    >>> print(data.scenes.problems[0])
    annotations[1] (id 2): a.png: the box 10 10 -5 15 is inverted
    """
    if where == shapes.NAME:
        made = shapes.Shapes(split)
        scenes = made.scenes()
        return DetectionSet(replace(scenes, masks=scenes.masks and masks != "no"), made)
    path = place_of(where)
    if path.is_file():
        if images is None and not has_pictures(path.parent):
            raise ValueError(f"{where}: there are no images next to it. Set data.images to the folder or tar of images")
        place: Path | list[Path] = Path(images).expanduser() if images else path.parent
    elif path.is_dir():
        path, place = find_split(path, split)
        if images is not None:
            place = Path(images).expanduser()
    else:
        raise ValueError(
            f"{where}: no such folder or COCO file; {shapes.NAME!r} is a synthetic dataset that needs no files"
        )
    files = open_images(place)
    return DetectionSet(read_scenes(path, files, masks=masks, categories=categories), files)


def splits_of(where: str) -> tuple[str, ...]:
    """Return which of "train", "validation" and "test" a dataset has; a file that matches two counts as the first.

    Args:
        where: as for `open_set`.

    >>> from lambdanets.detect.coco import splits_of
    >>> splits_of("shapes")
    ('train', 'validation', 'test')
    """
    if where == shapes.NAME:
        return tuple(SPLITS)
    path = place_of(where)
    if not path.is_dir():
        return ("train",)
    files = {split: annotations_of(path, split) for split in SPLITS}
    return tuple(
        split for i, (split, file) in enumerate(files.items()) if file is not None and file not in [*files.values()][:i]
    )


def annotations_of(folder: Path, split: str) -> tuple[str, Path] | None:
    """Return the name that a folder uses for a split, and its annotation file; None without one."""
    for word in SPLITS[split]:
        for layout in LAYOUTS:
            found = sorted(p for p in folder.glob(layout.format(word)) if p.is_file())
            if found:
                return word, found[0]
    return None


def find_split(folder: Path, split: str) -> tuple[Path, Path | list[Path]]:
    """Return the annotation file of a split, and the folder or tar files of its images."""
    found = annotations_of(folder, split)
    if found is None:
        there = [name for name in SPLITS if annotations_of(folder, name)]
        raise NoSplitError(
            f"{folder} has no {split} annotations"
            + (
                f", only {', '.join(there)}"
                if there
                else ": it must have instances_train.json or another COCO layout (docs/detection.md)"
            )
        )
    word, path = found
    tars = sorted(p for p in folder.glob(f"{word}*") if p.name.endswith(SHARDS) and p.is_file())
    if tars:
        return path, tars
    for layout in FOLDERS:
        for place in sorted(folder.glob(layout.format(word))):
            if place.is_dir():
                return path, place
    return path, path.parent


def has_pictures(folder: Path) -> bool:
    return any(p.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp") for p in folder.iterdir())
