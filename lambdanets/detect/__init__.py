"""Object detection and instance segmentation: Mask R-CNN on any of our networks, with COCO-format data."""
