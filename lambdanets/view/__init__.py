"""Visualisation of lambda layers: the weight of every context position for a query, by content and by position.

In Python and in notebooks:

    from lambdanets.view import interactions, interactive
    seen = interactions(model, image, query=(112, 80))   # a notebook displays it
    seen.layers[0].position                              # [heads, intra-depth, height, width]
    interactive(model, image).save("view.html")          # a page in which any pixel can be clicked
"""

from lambdanets.view.look import Interactions, LayerInteractions, Reach, interactions, reaches
from lambdanets.view.page import Page, interactive

__all__ = ["Interactions", "LayerInteractions", "Page", "Reach", "interactions", "interactive", "reaches"]
