"""Write the lambda operation as a kernel package for the Hugging Face hub, from the sources of lambdanets.

    python benchmarks/hub_kernel.py build/hub-kernel

The folder has the layout of kernel-builder: `build.toml`, a card, a benchmark, and sources that do not import
lambdanets. The operator namespace contains a digest of the sources, so that several versions can be loaded at the same
time, also together with lambdanets. Triton compiles the kernels on the machine that runs them: the variants in `build/`
are copies of the sources.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import lambdanets

NAME, MODULE = "lambda-op", "lambda_op"
BACKENDS = ("cpu", "cuda")
LICENSE = "Apache-2.0"
HERE = Path(__file__).resolve().parent
PACKAGE = Path(lambdanets.__file__).resolve().parent
IMPORT = re.compile(r"^(\s*)from lambdanets\.(ops|typed)((?:\.\w+)*) import ", re.MULTILINE)
NAMESPACE = re.compile(r'(torch\.ops\.|"|\()lambdanets(?=\.|::|")')


@dataclass(frozen=True)
class HubKernel:
    """Write a kernel package for the Hugging Face hub from the sources of lambdanets."""

    output: Annotated[Path, tyro.conf.Positional] = Path("build/hub-kernel")
    """Folder to write; replaced if this script wrote it before."""
    repo_id: str | None = None
    """Repository on the hub, as owner/name, for the card and the build."""

    def run(self) -> None:
        sources = kernel_sources()
        if self.output.exists():
            if not (self.output / "build.toml").is_file():
                raise SystemExit(f"{self.output} exists and is not a kernel package: choose another folder")
            shutil.rmtree(self.output)
        write_all(self.output / "torch-ext" / MODULE, sources)
        for backend in BACKENDS:
            variant = self.output / "build" / f"torch-{backend}"
            write_all(variant, sources)
            (variant / "metadata.json").write_text(json.dumps(metadata(backend, sources), indent=2) + "\n")
        (self.output / "build.toml").write_text(build_toml(self.repo_id))
        (self.output / "README.md").write_text(card(self.repo_id))
        (self.output / "benchmarks").mkdir()
        shutil.copy(HERE / "hub_kernel" / "benchmark.py", self.output / "benchmarks" / "benchmark.py")
        shutil.copy(PACKAGE.parent / "LICENSE", self.output / "LICENSE")


def kernel_sources() -> dict[str, str]:
    """Return the text of each file of the kernel, by path."""
    found = {path.relative_to(PACKAGE / "ops").as_posix(): path.read_text() for path in (PACKAGE / "ops").rglob("*.py")}
    found["typed.py"] = (PACKAGE / "typed.py").read_text()
    found["layers.py"] = (HERE / "hub_kernel" / "layers.py").read_text()
    found["__init__.py"] = found["__init__.py"].replace(
        "\n__all__ = [", '\nfrom . import layers\n\n__all__ = ["layers", ', 1
    )
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]
    found = {path: portable(path, text, f"{MODULE}_{digest}") for path, text in sorted(found.items())}
    for path, text in found.items():
        left = re.search(r"^\s*(?:from|import) lambdanets.*", text, re.MULTILINE)
        if left:
            raise ValueError(f"{path} of the kernel imports lambdanets: {left[0].strip()}")
    return found


def portable(path: str, text: str, namespace: str) -> str:
    """Return the source with relative imports and its own operator namespace."""
    dots = "." * (path.count("/") + 1)

    def relative(found: re.Match[str]) -> str:
        indent, top, rest = found.groups()
        inside = "typed" if top == "typed" else rest.removeprefix(".")
        return f"{indent}from {dots}{inside} import "

    return NAMESPACE.sub(lambda found: f"{found[1]}{namespace}", IMPORT.sub(relative, text))


def write_all(folder: Path, sources: dict[str, str]) -> None:
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def metadata(backend: str, sources: dict[str, str]) -> dict[str, object]:
    """Return the metadata that `kernels` reads before it loads a variant."""
    digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:12]
    return {
        "name": NAME,
        "id": f"_{MODULE}_{backend}_{digest}",
        "version": 1,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
    }


def build_toml(repo_id: str | None) -> str:
    backends = ", ".join(f'"{name}"' for name in BACKENDS)
    general = f'[general]\nname = "{NAME}"\nversion = 1\nedition = 5\nlicense = "{LICENSE}"\nbackends = [{backends}]\n'
    hub = f'\n[general.hub]\nrepo-id = "{repo_id}"\n' if repo_id else ""
    return f"{general}{hub}\n[torch-noarch]\n"


def card(repo_id: str | None) -> str:
    text = (HERE / "hub_kernel" / "card.md").read_text()
    return text.replace("OWNER/NAME", repo_id or "OWNER/NAME").replace("VERSION", lambdanets.__version__)


if __name__ == "__main__":
    tyro.cli(HubKernel).run()
