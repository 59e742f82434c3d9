"""Detection sets as `lambdanets.data.check` reads them: every picture once, beside its annotations."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from lambdanets.data.decode import open_image
from lambdanets.detect.coco import DetectionSet
from lambdanets.detect.transforms import whole


@dataclass(frozen=True, eq=False)
class Pixels(DetectionSet):
    """The set, whose pictures are broken where training would say so: also those of another size than annotated."""

    def read(self, index: int) -> np.ndarray:
        data = super().read(index)
        image = Image.fromarray(data) if isinstance(data, np.ndarray) else open_image(data)
        return np.asarray(whole((image, self.scenes.pictures[index]))[0])
