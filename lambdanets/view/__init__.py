"""What lambda layers look at: the weight that every context position has for a query, by content and by position.

from lambdanets.view import interactions
seen = interactions(model, image, query=(112, 80))   # in a notebook it shows itself
seen.layers[0].position                              # [heads, intra-depth, height, width]
"""

from lambdanets.view.look import Interactions, LayerInteractions, Reach, interactions, reaches

__all__ = ["Interactions", "LayerInteractions", "Reach", "interactions", "reaches"]
