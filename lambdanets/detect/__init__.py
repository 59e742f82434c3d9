"""Object detection and instance segmentation: Mask R-CNN with any of our networks as its backbone, on COCO-format data."""
