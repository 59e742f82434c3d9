"""`lambdanets experiments webdemo`."""

import sys
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from lambdanets.options import optional
from lambdanets.runs import RunWeights

MISSING = "the web page needs gradio: pip install 'lambdanets[demo]'"


@dataclass(frozen=True)
class WebDemo:
    """Open a local web page: upload an image, see its class or objects, and click to see which pixels each layer uses.

    Without weights, the newest finished run in runs/ is used (`lambdanets demo` trains one in two minutes). Nothing is
    downloaded or sent to other machines.
    """

    what: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[WHAT]", help_behavior_hint="")] = None
    """The folder of a run (classes or detection), a .safetensors file, or a model folder."""
    host: str = "127.0.0.1"
    """Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for the whole network. There is no password."""
    port: int = 7860
    """TCP port; 0 takes any free port."""
    max_megabytes: float = 10.0
    """Maximum size of an uploaded file in MiB."""
    max_megapixels: float = 40.0
    """Maximum number of megapixels of an image; a small file can decompress into a huge image."""
    layers: tuple[str, ...] = ()
    """Only layers whose name contains one of these words, for example layer4 (stage c5) or layer3.0; by default all."""
    weights: RunWeights = "ema"
    """Weights of a run: ema (averaged), raw (last step) or best (best evaluation; --early-stopping or --keep-best)."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device, cpu or cuda; by default a GPU if there is one."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> int:
        for name in ("max_megabytes", "max_megapixels"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(self, name)}")
        if find_spec("gradio") is None:
            raise ValueError(MISSING)
        from lambdanets.data.decode import Limits
        from lambdanets.experiments.webdemo.analyse import open_model
        from lambdanets.experiments.webdemo.choose import examples, newest_run
        from lambdanets.experiments.webdemo.page import Desk, build
        from lambdanets.experiments.webdemo.serve import address_of, is_loopback, listening, serve

        console = Console(highlight=False, soft_wrap=True)
        limits = Limits(pixels=round(self.max_megapixels * 1e6), bytes=round(self.max_megabytes * 2**20))
        with listening(self.host, self.port) as taken:  # first, because loading takes long
            what = str(self.what or newest_run(weights=self.weights))
            model = open_model(what, weights=self.weights, device=self.device)
            desk = Desk(model, examples(what, model), limits, self.layers)
            console.print(f"[bold]{escape(what)}[/]: {escape(model.about)}")
            console.print(f"The page is at [bold]{address_of(taken)}[/]. Press Ctrl-C to stop.")
            if not is_loopback(taken):
                print(
                    f"lambdanets: --host {self.host}: everyone who can reach this machine over the network can open "
                    f"the page and see its example images without a password. Use 127.0.0.1 to prevent this.",
                    file=sys.stderr,
                )
            if self.browser:
                webbrowser.open(address_of(taken))  # the browser waits until the page is served
            with suppress(KeyboardInterrupt):
                serve(lambda: build(desk, what), taken, limits.bytes)
            console.print("Stopped.")
        return 0
