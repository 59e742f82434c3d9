"""Detection datasets for `lambdanets.data.check`, which reads every image once."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from lambdanets.data.decode import open_image
from lambdanets.detect.coco import DetectionSet
from lambdanets.detect.transforms import whole


@dataclass(frozen=True, eq=False)
class Pixels(DetectionSet):
    """A dataset whose `read` raises the errors that training would, also for images whose size is not as annotated."""

    def read(self, index: int) -> np.ndarray:
        data = super().read(index)
        image = Image.fromarray(data) if isinstance(data, np.ndarray) else open_image(data)
        return np.asarray(whole((image, self.scenes.pictures[index]))[0])
