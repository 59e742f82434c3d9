"""Object detection and instance segmentation: Mask R-CNN with lambdanets backbones, trained on COCO-format data."""
