"""Lists of class names: those of ImageNet, and text files."""

from pathlib import Path

from lambdanets.files import read_lines

IMAGENET, IMAGENET_WORDS = "imagenet", "imagenet-words"


def listed_names(where: str) -> tuple[str, ...] | None:
    """Return the class names that `where` lists, in order.

    Args:
        where: "imagenet": WordNet ids, the names of ImageNet's folders, such as n01440764; "imagenet-words": English
            names in the same order, such as tench; or a .txt file with a name on each line (the last column where
            there are tabs).

    Returns:
        None if `where` is none of these.
    """
    if where == IMAGENET:
        from timm.data.imagenet_info import ImageNetInfo

        return tuple(ImageNetInfo("imagenet-1k").label_names())
    if where == IMAGENET_WORDS:
        from torchvision.models._meta import _IMAGENET_CATEGORIES

        return tuple(_IMAGENET_CATEGORIES)
    path = Path(where).expanduser()
    if path.is_file() and path.suffix == ".txt":
        names = tuple(line.split("\t")[-1].strip() for line in read_lines(path))
        if not names:
            raise ValueError(f"{path} is empty: write one class name per line")
        return names
    return None
