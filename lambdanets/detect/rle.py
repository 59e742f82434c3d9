"""COCO masks: run lengths in column-major order, as numbers or packed into text, and polygons.

Implemented in numpy, so that training and writing results do not need a COCO library.
"""

from collections.abc import Sequence

import numpy as np

BITS, MORE, SIGN = 5, 0x20, 0x10  # per character of packed run lengths: bits, continuation bit, sign bit
FIRST_LETTER, LETTERS = 48, 64
LONGEST = 7  # characters per number: runs of 2^34 pixels
EDGES_AT_ONCE = 2**24  # rows times corners, a memory limit


def encode_crop(crop_HW: np.ndarray, left: int, top: int, height: int) -> list[int]:
    """Return all run lengths but the last of a mask that is zero outside of a crop, in an image of `height` rows."""
    rows_XY = np.ascontiguousarray(crop_HW.T, dtype=np.int8)
    edges = np.diff(np.pad(rows_XY, ((0, 0), (1, 1))), axis=1)
    column, row = np.nonzero(edges == 1)
    starts = (left + column) * height + top + row
    column, row = np.nonzero(edges == -1)
    ends = (left + column) * height + top + row
    apart = np.flatnonzero(starts[1:] != ends[:-1])  # a run may continue in the next column
    starts, ends = starts[np.r_[0, apart + 1]] if len(starts) else starts, ends[np.r_[apart, len(ends) - 1]]
    changes = np.stack([starts, ends], axis=1).ravel()
    return np.diff(changes, prepend=0).tolist()


def encode(mask_HW: np.ndarray, left: int = 0, top: int = 0, size: tuple[int, int] | None = None) -> dict:
    """Return {"size": [height, width], "counts": text} of a mask, or of a mask at (left, top) of an image of `size`."""
    height, width = mask_HW.shape if size is None else size
    counts = encode_crop(mask_HW, left, top, height) if mask_HW.any() else []
    left_over = height * width - sum(counts)
    if left_over or not counts:
        counts.append(left_over)
    return {"size": [height, width], "counts": pack(counts)}


def decode(counts: Sequence[int] | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the mask, bool [height, width], of run lengths, the first of which counts zeros."""
    height, width = size
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape(width, height).T


def pack(counts: Sequence[int]) -> str:
    """Return COCO's text: each run minus the one two before it, five bits per character, the low bits first."""
    letters = []
    for i, count in enumerate(counts):
        rest = count - counts[i - 2] if i > 2 else count
        more = True
        while more:
            low, rest = rest & 0x1F, rest >> BITS
            more = rest != (-1 if low & SIGN else 0)
            letters.append(low | (MORE if more else 0))
    return (np.array(letters, np.uint8) + FIRST_LETTER).tobytes().decode("ascii")


def unpack(text: str) -> list[int]:
    """Return the run lengths of COCO's text; an invalid text is a ValueError."""
    codes = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64) - FIRST_LETTER
    if ((codes < 0) | (codes >= LETTERS)).any():
        raise ValueError("the packed run lengths have characters that COCO does not use")
    if not len(codes):
        return []
    last = np.flatnonzero(codes & MORE == 0)  # last character of each number
    if not len(last) or last[-1] != len(codes) - 1:
        raise ValueError("the packed run lengths end within a run length")
    first = np.r_[0, last[:-1] + 1]
    lengths = last - first + 1
    if lengths.max() > LONGEST:
        raise ValueError(f"the packed run lengths have a run length of more than {LONGEST} characters")
    shifts = BITS * (np.arange(len(codes)) - np.repeat(first, lengths))
    counts = np.add.reduceat((codes & 0x1F) << shifts, first)
    counts -= np.where(codes[last] & SIGN, 1 << (BITS * lengths), 0)
    for start in (1, 2):  # from the fourth on, differences to the one two before
        counts[start::2] = counts[start::2].cumsum()
    return counts.tolist()


def fill_polygon(points: Sequence[float] | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return bool [height, width], the pixels whose centres are inside x0, y0, x1, y1, ... (even-odd rule)."""
    height, width = size
    x, y = np.asarray(points, np.float64).reshape(-1, 2).T
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    first = max(0, int(np.floor(y.min() - 0.5)))
    last = min(height, int(np.ceil(y.max() + 0.5)))
    mask = np.zeros((height, width), bool)
    if last <= first:
        return mask
    rows = max(1, EDGES_AT_ONCE // len(x))
    for begin in range(first, last, rows):
        end = min(begin + rows, last)
        centres = np.arange(begin, end)[:, None] + 0.5
        row, edge = np.nonzero((y <= centres) != (next_y <= centres))
        at = x[edge] + (centres[row, 0] - y[edge]) * (next_x[edge] - x[edge]) / (next_y[edge] - y[edge])
        column = np.clip(np.ceil(at - 0.5), 0, width).astype(np.int64)
        turns = np.zeros((end - begin, width + 1), np.uint8)
        np.bitwise_xor.at(turns, (row, column), 1)
        mask[begin:end] = np.bitwise_xor.accumulate(turns, axis=1)[:, :width].astype(bool)
    return mask


def bounds(mask_HW: np.ndarray) -> tuple[int, int, int, int] | None:
    """Return (left, top, right, bottom) of the pixels that are set, or None if there are none."""
    columns, rows = np.flatnonzero(mask_HW.any(axis=0)), np.flatnonzero(mask_HW.any(axis=1))
    if not len(columns):
        return None
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
