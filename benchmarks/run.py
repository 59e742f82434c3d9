"""Repeat the measurements in benchmarks/results: one list of all files and of the commands that write them.

    python benchmarks/run.py                     # list the files and their commands
    python benchmarks/run.py op-cpu engine-224   # write these two again

The commands run one after the other and replace the files. Run `python docs/generate.py` and
`python docs/figures/draw.py` afterwards: every number in the documents comes from the files. Files with `cuda` in their
names need a CUDA device; the documents show an NVIDIA H200.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"
IMAGENETTE = "imagenette2-160"  # https://github.com/fastai/imagenette

LAYER = "lambdanets bench layer --device cuda"
AGAINST = f"{LAYER} --against convolution --scopes 23"
OP_CPU = "lambdanets bench op --device cpu --threads 1 --batch 8"
NETWORK = "lambdanets bench network"
STAGES = "--shapes 7x7x512 14x14x256 28x28x128 56x56x64"
EXPORT = "--untrained --image-size 160 --threads 1 --json"
EXPORTED = "runs/exported"
SETS = "python benchmarks/detect_sets.py"
PLACEMENTS = " ".join(f"resnet50,placement={placement}" for placement in ("CCLL", "CLLL", "LLLL"))

# By file, without ".json". OUT is the path of the file; where a command does not name it, its output goes there.
COMMANDS: dict[str, str] = {
    "layer-cuda": f"{LAYER} --scopes 23 {STAGES} --output OUT",
    "layer-cuda-convolution": f"{AGAINST} --output OUT",
    "layer-cuda-pooled": f"{AGAINST} --pooled --output OUT",
    "layer-cuda-batch32": f"{AGAINST} --batch 32 {STAGES} --output OUT",
    "layer-cuda-batch1": f"{AGAINST} --batch 1 {STAGES} --output OUT",
    "layer-cuda-float16": f"{AGAINST} --dtype float16 {STAGES} --output OUT",
    "layer-cuda-float32": f"{AGAINST} --dtype float32 {STAGES} --output OUT",
    "layer-cuda-growth": (
        f"{LAYER} --against convolution --batch 8 --scopes 23 global --modes inference "
        "--shapes 7x7x64 14x14x64 28x28x64 56x56x64 112x112x64 128x128x64 --output OUT"
    ),
    "layer-cuda-global": (
        f"{LAYER} --against convolution --batch 128 --scopes global --shapes 64x64x256 --modes training --output OUT"
    ),
    "kernels-h200": "lambdanets bench kernels --output OUT",
    "networks-cuda-placements": (
        f"{NETWORK} resnet50 {PLACEMENTS} resnet50 --dtype bfloat16 --no-latency --batch 256 --compile blocks "
        "--image-size 224 --output OUT"
    ),
    "networks-cuda-blocks": (
        f"{NETWORK} --preset resnet50-placements --dtype bfloat16 --no-latency --batch 256 --compile blocks "
        "--image-size 224 --output OUT"
    ),
    "networks-cuda": f"{NETWORK} --preset resnet50-placements --dtype bfloat16 --no-latency --batch 256 --output OUT",
    "networks-cuda-1024": (
        f"{NETWORK} resnet50 resnet50,placement=CCLL resnet50,placement=LLLL --dtype bfloat16 --no-latency --output OUT"
    ),
    "op-cpu": f"{OP_CPU} --scopes 7 23 --output OUT",
    "op-cpu-global": f"{OP_CPU} --scopes global --shapes 28x28x128 14x14x256 7x7x512 --output OUT",
    "op-cpu-depthwise": f"{OP_CPU} --shapes 28x28x128 --scopes 7 23 --layers False --output OUT",
    "reproduce-h200/reproduce": f"lambdanets reproduce all --out {RESULTS}/reproduce-h200",
    "engine": f"python benchmarks/loop_overhead.py --data {IMAGENETTE} --output OUT",
    "engine-224": (
        f"python benchmarks/loop_overhead.py --data {IMAGENETTE} --placement LLLL --image-size 224 --batch 512 "
        "--turns 8 --output OUT"
    ),
    "loader-cpu": (
        f"lambdanets data speed {IMAGENETTE} --image-size 128 --randaugment-layers 2 --images 2000 --rounds 3 "
        "--workers 0 --json OUT"
    ),
    "own-images": f"python benchmarks/own_images.py {IMAGENETTE} OUT",
    "teachers": "python benchmarks/teachers.py yardstick OUT --resnet teacher.safetensors --lite2 lite2.pth",
    "fine-tuning": f"python benchmarks/fine_tuning.py {IMAGENETTE} OUT",
    "embedding-std": f"python benchmarks/embedding_std.py {IMAGENETTE} OUT --epochs 4 --seeds 0 1 --device cpu",
    "kill-and-resume": "python benchmarks/kill_and_resume.py --kills 40 --output OUT",
    "language-cpu": "python benchmarks/language_models.py --minutes 5 --threads 1 --output OUT",
    "pseudo-imagenette": (
        f"python benchmarks/pseudo_imagenette.py {IMAGENETTE} runs/pseudo --batch-size 128 --steps 2000 --ratio 3 "
        "--repeats 3 --output OUT"
    ),
    "pseudo-select": "python benchmarks/pseudo_select.py --output OUT",
    "pseudo-select-40M": "python benchmarks/pseudo_select.py --entries 40000000 --soft 0 --output OUT",
    "guard-imagenette": f"python benchmarks/guard_hashes.py {IMAGENETTE} --output OUT",
    "detect-cuda": "python benchmarks/detector_step.py --sizes 1024x1024 1333x800 --batch 8 --repeats 10 --output OUT",
    # First `detect_sets.py weights` for each backbone, then `train` for each set, backbone and seed: see its help.
    "detect-sets": f"{SETS} score . runs/sets/kept --output OUT",
    "detect-sets-400": f"{SETS} score . runs/sets-400/kept --output OUT",
    "export-lambda_resnet50": f"lambdanets export lambda_resnet50 {EXPORTED} {EXPORT}",
    "export-lambda_resnet50-dynamic": (
        f"lambdanets export lambda_resnet50 {EXPORTED} --size dynamic --formats onnx program {EXPORT}"
    ),
    "export-resnet50-llll": (f"lambdanets export resnet50 {EXPORTED} --options placement=LLLL --formats onnx {EXPORT}"),
}

# Records of experiments with earlier kernels. The code that was measured is in the history of the repository, by the
# commit in each file; lambdanets/ops/triton/HISTORY.md has the results.
RECORDS = (
    "depth-first-cuda",
    "kernel-ablations-cuda",
    "kernel-variants-cuda",
    "maps-variants-cuda",
    "power-variants-cuda",
    "side-by-side-cuda",
    "small-variants-cuda",
    "step-variants-cuda",
    "window-variants-cuda",
)


def command(name: str) -> str:
    """Return the shell command that writes a file of benchmarks/results."""
    path = f"{RESULTS}/{name}.json"
    found = COMMANDS[name].replace(" OUT", f" {path}")
    return found if path in found or "--out " in found else f"{found} > {path}"


@dataclass(frozen=True)
class Run:
    """Write files of benchmarks/results again, or list them with their commands."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME ...")] = ()
    """Files, without `.json`; none: list all files and their commands."""

    def run(self) -> int:
        if unknown := [name for name in self.names if name not in COMMANDS]:
            raise ValueError(f"no command for {', '.join(unknown)}: choose among {', '.join(COMMANDS)}")
        if not self.names:
            for name in COMMANDS:
                print(f"{name}\n    {command(name)}")
            return 0
        for name in self.names:
            line = re.sub(r"^(lambdanets|python) ", lambda match: START[match[1]], command(name))
            print(f"+ {line}", flush=True)
            if status := subprocess.run(line, shell=True, cwd=ROOT).returncode:
                return status
        return 0


START = {"python": f"{shlex.quote(sys.executable)} ", "lambdanets": f"{shlex.quote(sys.executable)} -m lambdanets "}


if __name__ == "__main__":
    try:
        sys.exit(tyro.cli(Run).run())
    except ValueError as error:
        sys.exit(f"run.py: {error}")
