"""Export of networks to ONNX, OpenVINO, torch.export, AOTInductor and the hub; each file is loaded and compared.

from lambdanets.export.formats import export

export(model, "exported", formats=("onnx", "program"), size="fixed")
"""
