"""A confusion matrix as inline SVG; every cell has a tooltip."""

from collections.abc import Iterator, Sequence

from markupsafe import Markup
from torch import Tensor

from lambdanets.report.scores import by_class
from lambdanets.report.show import shortened

MOST_CLASSES = 100  # with more, only those with the lowest recall are drawn
NUMBERS_UP_TO = 20  # classes; with more there is no room for numbers
LONGEST_LABEL = 18
SIDE = 620  # pixels of the drawing without labels

CELL = Markup(
    '<rect class="{kind}" x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" fill-opacity="{opacity:.3f}">'
    "<title>{title}</title></rect>"
)
NUMBER = Markup('<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size:g}">{count}</text>')
ROW = Markup('<text class="row" x="{x:g}" y="{y:g}" font-size="{size:g}">{short}<title>{name}</title></text>')
COLUMN = Markup(
    '<text class="column" transform="translate({x:g} {y:g}) rotate({turn})" text-anchor="{anchor}" '
    'font-size="{size:g}">{short}<title>{name}</title></text>'
)
GROUND = Markup('<rect class="ground" x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}"/>')
FRAME = Markup(
    '<svg class="matrix" viewBox="0 0 {width:g} {height:g}" style="width:{width:g}px" role="img" '
    'aria-label="confusion matrix">{content}</svg>'
)


def chosen(matrix_CC: Tensor) -> list[int]:
    """Return the classes that are drawn, in ascending order: all, or those with the lowest recall."""
    if len(matrix_CC) <= MOST_CLASSES:
        return list(range(len(matrix_CC)))
    return sorted(row.index for row in by_class(matrix_CC)[: MOST_CLASSES // 2])


def draw(matrix_CC: Tensor, names: Sequence[str]) -> Markup:
    """Return the matrix as SVG. Rows are true classes, columns are predicted classes; shades are shares of the row."""
    classes = chosen(matrix_CC)
    size = min(44.0, max(7.0, SIDE / len(classes)))
    text = min(12.0, max(6.0, size * 0.8))
    label = text * 0.62 * max(len(shortened(names[i], LONGEST_LABEL)) for i in classes)  # estimated pixels
    left, top, side = 10 + label, 12 + label * 0.85, len(classes) * size
    upright = label < size / 2
    parts = [GROUND.format(x=left, y=top, side=side)]
    for place, i in enumerate(classes):
        names_of = {"short": shortened(names[i], LONGEST_LABEL), "name": names[i], "size": text}
        x, y = left + (place + (0.5 if upright else 0.6)) * size, top + place * size
        parts.append(ROW.format(x=left - 5, y=y + size / 2, **names_of))
        turn, anchor = (0, "middle") if upright else (-55, "start")
        parts.append(COLUMN.format(x=x, y=top - 7, turn=turn, anchor=anchor, **names_of))
        row = [int(matrix_CC[i, j]) for j in classes]
        parts += cells(i, row, int(matrix_CC[i].sum()), classes, names, (left, y, size, text))
    width = left + side + (0 if upright else label * 0.6)  # the label of the last column extends to the right
    return FRAME.format(width=width, height=top + side + 2, content=Markup("").join(parts))


def cells(
    i: int,
    row: Sequence[int],
    total: int,
    classes: Sequence[int],
    names: Sequence[str],
    place: tuple[float, float, float, float],
) -> Iterator[Markup]:
    """Yield the cells of row i that are not 0, with numbers if there is room."""
    left, y, size, text = place
    for column, (j, count) in enumerate(zip(classes, row, strict=True)):
        if not count:
            continue
        share, x = count / total, left + column * size
        opacity = 0.15 + 0.85 * (share if i == j else share**0.5)
        said = f"{names[i]} predicted correctly" if i == j else f"{names[i]} predicted as {names[j]}"
        yield CELL.format(
            kind="right" if i == j else "wrong",
            x=x,
            y=y,
            size=size - (1 if size > 12 else 0),
            opacity=opacity,
            title=f"{said}: {count} of {total} ({100 * share:.1f}%)",
        )
        if len(classes) <= NUMBERS_UP_TO:
            fits = min(text, size * 1.5 / len(str(count)))
            on = "on" if opacity > 0.6 else "off"
            yield NUMBER.format(kind=on, x=x + size / 2, y=y + size / 2, size=fits, count=count)
