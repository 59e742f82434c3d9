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

MISSING = "the page needs gradio: pip install 'lambdanets[demo]'"


@dataclass(frozen=True)
class WebDemo:
    """Open a web page: upload a picture, see its class or its objects, and click to see what each layer looks at.

    Without weights it takes the newest finished run in runs/ (`lambdanets demo` trains one in two minutes). Nothing is
    downloaded, and nothing leaves this machine.
    """

    what: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[WHAT]", help_behavior_hint="")] = None
    """The folder of a run (classes or detection), a .safetensors file, or a model folder."""
    host: str = "127.0.0.1"
    """Who can reach it: 127.0.0.1 this machine alone, 0.0.0.0 everybody in the network. There is no password."""
    port: int = 7860
    """0 takes any that is free."""
    max_megabytes: float = 10.0
    """The largest file."""
    max_megapixels: float = 40.0
    """The largest picture: a small file can unpack into a huge one."""
    layers: tuple[str, ...] = ()
    """Only layers whose name holds one of these words: layer4 (c5), layer3.0, ..."""
    weights: RunWeights = "ema"
    """Of a run: the average of the weights, those of the last step, or those of the best evaluation (early stopping or
    --keep-best)."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; by default a GPU if there is one."""
    browser: bool = True
    """Open the page in the browser."""

    def run(self) -> int:
        for name in ("max_megabytes", "max_megapixels"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: more than 0")
        if find_spec("gradio") is None:
            raise ValueError(MISSING)
        from lambdanets.data.decode import Limits
        from lambdanets.experiments.webdemo.analyse import open_model
        from lambdanets.experiments.webdemo.choose import examples, newest_run
        from lambdanets.experiments.webdemo.page import Desk, build
        from lambdanets.experiments.webdemo.serve import address_of, is_loopback, listening, serve

        console = Console(highlight=False, soft_wrap=True)
        limits = Limits(pixels=round(self.max_megapixels * 1e6), bytes=round(self.max_megabytes * 2**20))
        with listening(self.host, self.port) as taken:  # before anything that takes long
            what = str(self.what or newest_run(weights=self.weights))
            model = open_model(what, weights=self.weights, device=self.device)
            desk = Desk(model, examples(what, model), limits, self.layers)
            console.print(f"[bold]{escape(what)}[/]: {escape(model.about)}")
            console.print(f"The page is at [bold]{address_of(taken)}[/]; Ctrl-C ends it.")
            if not is_loopback(taken):
                print(
                    f"lambdanets: --host {self.host}: everybody who can reach this machine over the network can open "
                    f"this page, without a password, and see its example pictures; 127.0.0.1 is for you alone.",
                    file=sys.stderr,
                )
            if self.browser:
                webbrowser.open(address_of(taken))  # it waits until the page is there
            with suppress(KeyboardInterrupt):  # none comes where a shell started this in the background
                serve(lambda: build(desk, what), taken, limits.bytes)
            console.print("The page is closed.")
        return 0
