"""The real command line with the tiny model registered, and optionally a signal at a chosen point of its work.

Environment: TINY_SHA256, the GGUF's hash; SIGNAL_AT="NUMBER EVENT TEXT" sends itself signal NUMBER at the first audit
event of that name whose arguments contain TEXT (the event comes before the operation).
"""

import os
import sys
from typing import Any

from serve_app.models import registry
from serve_app.models.__main__ import main

registry.register(
    registry.KnownModel("tiny", "tiny-llama-gguf==1.0", "tiny_llama_gguf/tiny.gguf", os.environ["TINY_SHA256"])
)
armed = os.environ.get("SIGNAL_AT", "").split(" ", 2)


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if len(armed) == 3 and event == armed[1] and armed[2] in repr(arguments):
        number = int(armed[0])
        armed.clear()
        os.kill(os.getpid(), number)


sys.addaudithook(hook)
sys.exit(main(sys.argv[1:]))
