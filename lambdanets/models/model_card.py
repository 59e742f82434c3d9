"""The model card: README.md of a model folder, generated from the weights' card, which the Hugging Face hub shows."""

from pathlib import Path
from typing import TYPE_CHECKING

from lambdanets.files import write_text

if TYPE_CHECKING:
    from lambdanets.models.network import Network
    from lambdanets.models.pretrained import Card

README = "README.md"
GENERATED = "<!-- Written by lambdanets, and again whenever the model is saved here, until this line is removed. -->"
SHOWN_CLASSES = 20
UNKNOWN_LICENSE = """\
The authors of these weights choose their licence, which depends on the
training images: add `license:` to the metadata at the top of this file."""
PAGE = """\
---
library_name: lambdanets
pipeline_tag: image-classification
tags:
- lambdanets
- timm
- transformers
- image-classification
---
{generated}
# {name}

An image classifier: the network `{name}` of lambdanets {version} (LambdaNetworks, Bello, ICLR 2021), with
{parameters:,} parameters and {classes} classes{class_names}.

## Results

{results}
{training}
## Preprocessing

| | |
| --- | --- |
| image | {size} pixels, {channels} channels: resize the short side to size / {crop:g}, then crop the centre |
| interpolation | {interpolation} |
| EXIF orientation | {orientation} |
| mean | {mean} |
| standard deviation | {std} |

## Use

```sh
pip install 'lambdanets[train]'
lambdanets predict {source} photo.jpg
```

```python
from lambdanets.models import from_pretrained

model = from_pretrained("{source}").eval()  # model.card has the preprocessing and the class names
```

In transformers and timm; `import lambdanets.timm` registers the networks:

```python
import lambdanets.timm
from transformers import pipeline

classify = pipeline("image-classification", model="{source}")
```

```python
import lambdanets.timm
import timm

model = timm.create_model("{timm_source}", pretrained=True).eval()
```

## Licence

lambdanets has the Apache License 2.0. {license}
"""


def write_model_card(network: "Network", folder: Path, card: "Card", repo_id: str | None = None) -> None:
    """Write README.md, unless the folder has one that was written or changed by hand."""
    if may_replace(folder):
        write_text(folder / README, model_card(network, card, repo_id))


def may_replace(folder: Path) -> bool:
    """Return whether README.md does not exist or has the comment of generated files."""
    path = folder / README
    return not path.exists() or (path.is_file() and GENERATED in path.read_text(encoding="utf-8", errors="replace"))


def model_card(network: "Network", card: "Card", repo_id: str | None = None) -> str:
    """Return the text of the model card; `repo_id` is the model's id on the hub, or None for a local folder."""
    from lambdanets import __version__

    preprocessing = card.preprocessing
    size = preprocessing.size
    names = ", ".join(escaped(name) for name in card.class_names[:SHOWN_CLASSES])
    more = ", ..." if len(card.class_names) > SHOWN_CLASSES else ""
    rows = "\n".join(f"| {escaped(name)} | {value:.5g} |" for name, value in card.metrics.items())
    measured = f"{card.examples:,} images" if card.examples else ""
    measured = " of ".join(filter(None, [measured, escaped(card.evaluated_on)]))
    facts = {"images": card.training_data, "teacher": card.teacher, "licence of the weights": card.license}
    known = "\n".join(f"| {name} | {escaped(text)} |" for name, text in facts.items() if text)
    return PAGE.format(
        generated=GENERATED,
        name=network.name,
        version=__version__,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        classes=network.num_classes,
        class_names=f" ({names}{more})" if names else "",
        results=(f"| metric | value |\n| --- | ---: |\n{rows}" if rows else "These weights have no stored results.")
        + (f"\n\nMeasured on {measured}." if rows and measured else ""),
        training=f"\n## Training\n\n| | |\n| --- | --- |\n{known}\n" if known else "",
        size=f"{size} x {size}" if isinstance(size, int) else f"{size[0]} x {size[1]}",
        channels=network.config.in_chans,
        crop=preprocessing.crop,
        interpolation=preprocessing.interpolation,
        orientation="applied" if preprocessing.exif_orientation else "ignored",
        mean=", ".join(f"{value:g}" for value in preprocessing.mean),
        std=", ".join(f"{value:g}" for value in preprocessing.std),
        source=repo_id or "path/to/this/folder",
        license=(f"These weights: {escaped(card.license)}." if card.license else UNKNOWN_LICENSE),
        timm_source=f"hf-hub:{repo_id}" if repo_id else "local-dir:path/to/this/folder",
    )


def escaped(text: str) -> str:
    """Escape a text for Markdown and HTML: all characters except letters, digits, spaces and hyphens."""
    return "".join(c if c.isalnum() or c in " -" else f"&#{ord(c)};" for c in text)
