"""`lambdanets demo`: a page on this machine that shows what a network finds in a picture and where its layers look.

`analyse` has the networks and the limits on what is uploaded, `choose` finds the weights, `page` draws it with gradio,
`serve` lets the browser in, and nobody else.
"""
