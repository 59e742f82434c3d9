"""`lambdanets experiments webdemo`: a local web page with predictions and interactions for uploaded images.

`analyse` runs the networks on uploaded images, `choose` finds weights and example images, `page` is the page in gradio,
`serve` is the server with its access limits.
"""
