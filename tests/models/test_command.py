"""`lambdanets models`."""

import json

from lambdanets.cli import main


def test_models(capsys):
    assert main(["models", "lambda_resnet1*", "--format", "json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert sorted(models) == ["lambda_resnet101", "lambda_resnet101_c4", "lambda_resnet152", "lambda_resnet152_c4"]
    assert models["lambda_resnet101"]["parameters"] == 36_866_920
    accuracies = {(one["top1"], one["image_size"]) for one in models["lambda_resnet152"]["paper"]}
    assert {("83.4", 256), ("83.8", 256)} <= accuracies  # the paper gives both
    assert main(["models", "*mobilenet_v2"]) == 0
    out = capsys.readouterr().out
    assert "72.7 at 224 (mobilenets)" in out
    assert "0.58" in out
    assert main(["models", "nothing"]) == 2
