"""`lambdanets experiments webdemo`: a local web page that shows what a network finds in a picture, and why.

`analyse` has the networks and the limits on what is uploaded, `choose` finds the weights, `page` draws it with gradio,
`serve` lets the browser in, and nobody else.
"""
