"""Networks for other runtimes: ONNX, torch.export, AOTInductor, and the hub's layout; each compared before it counts.

from lambdanets.export.formats import export
export(model, "exported", formats=("onnx", "program"), size="fixed")
"""
